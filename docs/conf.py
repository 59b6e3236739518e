"""How Sphinx makes the documentation site (``make docs``).

The source is the repository itself, not ``docs/`` alone: so a link from a page to a README, an
example or a test is the same file path on the site and where the repository is read. Nothing is
fetched from the network, while building or while reading.

The navigation is ``docs/index.md``: each of its sections is one of the navigation's, and each link
in it a page. A page that is linked nowhere there fails the build.
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "client")]

import discod  # noqa: E402  # the checkout's, whatever is installed

project = "discod"
author = "The discod authors"
release = version = discod.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "docs/**.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docker/README.md",
    "examples/README.md",
    "systemd/README.md",
]
exclude_patterns = [".*", "*venv*", "build", "dist", "site", "*-results"]  # not even looked into
root_doc = "docs/index"
myst_heading_anchors = 3  # as deep as pages are linked into; the names are GitHub's
nitpicky = True  # a name in a docstring that is gone, or misspelt, fails the build
nitpick_ignore_regex = [
    ("py:.*", r"(torch|os|collections|pathlib)\..*"),  # of others: linking needs the network
    ("py:.*", r"discod\.(?!wire\.).*"),  # the daemon's inside, which is on no page
]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"discod {release}"
html_copy_source = False
html_show_copyright = False
html_extra_path = ["_site"]  # index.html, which leads to docs/index.html


def contents(page: str) -> str:
    """A hidden ``toctree`` for each section of the page, with the pages that it links to."""
    trees = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        links = re.findall(r"^- \[([^\]]+)\]\(([^)#:]+)\.md\)", text, re.MULTILINE)
        entries = "\n".join(f"{name} <{path}>" for name, path in links)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n")
    return "\n".join(trees)


def add_contents(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Give ``docs/index.md`` its navigation."""
    if docname == root_doc:
        source[0] += "\n" + contents(source[0])


def keep_colons(
    _app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Have napoleon not take a value's docstring up to its first colon for the value's type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # it looks at the first line only; this one is an empty comment


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("source-read", add_contents)
