"""The documentation site builds without a warning, and has what it promises."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import disco_client
from discod.wire.messages import VERBS, Failure
from tests.helpers.pages import DOCS

ROOT = DOCS.parent
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src"}
"""Elements that a browser loads by itself, and the attribute that says from where."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does."""
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^\t\$\(BIN\)/python -m sphinx (.*)$", makefile, re.MULTILINE)
    *options, source, _ = command.split()
    assert "--fail-on-warning" in options
    out = tmp_path_factory.mktemp("site")
    doctrees = tmp_path_factory.mktemp("doctrees")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "-d", str(doctrees), source, str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert built.returncode == 0, built.stderr
    return out


class Fetched(HTMLParser):
    """Collects what a page has a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        target = dict(attributes).get(FETCHED.get(tag, ""))
        if target:
            self.targets.append(target)


def pages(site: Path) -> Iterator[tuple[Path, str]]:
    """Every page of the site."""
    for path in sorted(site.rglob("*.html")):
        if "_static" not in path.parts:
            yield path, path.read_text()


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    """Else a page would be there for readers of the repository alone, or be found by chance."""
    index = (DOCS / "index.md").read_text()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS)
        assert (site / "docs" / name.with_suffix(".html")).exists()
        assert page.name == "index.md" or re.search(rf"^- \[.*\]\({name}\)$", index, re.MULTILINE)


def test_the_root_leads_to_the_first_page(site: Path) -> None:
    """Else who opens the site's address would see nothing."""
    (target,) = re.findall(r"url=([^\"]+)", (site / "index.html").read_text())
    assert (site / target).exists()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Else the pages could not be read without a network, and others would know who reads them."""
    for path, text in pages(site):
        parser = Fetched()
        parser.feed(text)
        assert parser.targets or path == site / "index.html"
        assert [one for one in parser.targets if re.match(r"(\w+:)?//", one)] == [], path


def test_the_reference_has_every_public_name(site: Path) -> None:
    """Else a function, an error or a message could be known from the source alone."""
    api = (site / "docs" / "api.html").read_text()
    known = set(re.findall(r'id="disco_client\.(?:errors\.)?(\w+)"', api))
    assert set(disco_client.__all__) - known == set()
    protocol = (site / "docs" / "protocol.html").read_text()
    described = set(re.findall(r'id="discod\.wire\.messages\.(\w+)"', protocol))
    assert {verb.__name__ for verb in VERBS.values()} - described == set()


def test_verbs_and_failures_are_in_the_protocols_tables() -> None:
    """Else a verb would have another number than the page says, or a failure no meaning."""
    text = (DOCS / "protocol.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert {int(number): name for number, name in rows} == {
        number: verb.__name__ for number, verb in VERBS.items()
    }
    table = text.partition("## Why a request fails")[2]
    kinds = re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert sorted(kinds) == sorted(Failure)
