"""Python environments that have what a distribution declares, and nothing else, without a download.

The packages are those of the environment that the tests run in, linked. So an import of something
that is not declared fails there as it would after ``pip install`` in an empty environment. What
this does not show is whether a package index can give them; ``test_readme.py`` in its long form
does.
"""

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.helpers.jobs import ROOT


class Environment:
    """A new virtual environment.

    Args:
        path: Where it is made.
        pip: Whether it has pip, as those have that ``python3 -m venv`` makes.
    """

    def __init__(self, path: Path, pip: bool = False) -> None:
        self.path = path
        venv.create(path, with_pip=pip, symlinks=True)
        self.python = path / "bin" / "python"
        (self.site,) = path.glob("lib/python*/site-packages")

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a shell in which it is active."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DISCOD_", "PIP_", "PYTHON", "VIRTUAL_ENV"))
        }
        path = f"{self.path / 'bin'}:{os.environ['PATH']}"
        return inherited | {"PATH": path, "VIRTUAL_ENV": str(self.path)} | more

    def install(self, wheel: Path) -> None:
        """Install a wheel, without what it requires, by the pip of the tests."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
        subprocess.run([*pip, "install", *options, str(wheel)], check=True, timeout=100)

    def check(self) -> str:
        """What ``pip check`` says of it."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        done = subprocess.run([*pip, "check"], capture_output=True, text=True, timeout=100)
        return done.stdout + done.stderr


def link_packages(site: Path, requirements: Iterable[str]) -> None:
    """Link into ``site`` what the requirements need, in their turn too.

    Raises:
        PackageNotFoundError: The tests' own environment lacks one.
    """
    for found in closure(map(Requirement, requirements)):
        for file in found.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


def closure(requirements: Iterable[Requirement]) -> Iterator[Distribution]:
    """The distributions that are needed."""
    seen: set[tuple[str, str]] = set()
    waiting = [(one, extra) for one in requirements for extra in ("", *sorted(one.extras))]
    while waiting:
        requirement, extra = waiting.pop()
        if (requirement.name, extra) in seen:
            continue
        seen.add((requirement.name, extra))
        found = distribution(requirement.name)
        yield found
        for text in found.requires or ():
            further = Requirement(text)
            if further.marker is None or further.marker.evaluate({"extra": extra}):
                waiting += [(further, of) for of in ("", *sorted(further.extras))]


def declared(extra: str = "") -> list[str]:
    """What ``pip install discod``, or ``discod[extra]``, needs: from ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    further: list[str] = project["optional-dependencies"][extra] if extra else []
    return [*project["dependencies"], *further]
