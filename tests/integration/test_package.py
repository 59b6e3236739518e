"""Sdist and wheel: what is in them, and that they work where nothing else is installed."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

import discod
from tests.helpers.environments import Environment, declared, link_packages
from tests.helpers.pages import DOCS
from tests.helpers.shells import Service, shell
from tests.helpers.tools import needs

ROOT = DOCS.parent
CACHES = re.compile(r"__pycache__|\.pyc$|_cache/|\.egg-info|(^|/)(\.venv|\.git|dist|site|build)/")


class Built(NamedTuple):
    """What a release consists of."""

    sdist: Path
    wheel: Path


def build(source: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=100, cwd=out
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """As ``make dist`` does it: the sdist from the tree, and the wheel from that."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_sdist_is_the_repository(built: Built) -> None:
    """Else who builds or tests from it would lack files, or get somebody's caches."""
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in names if CACHES.search(name)] == []
    assert {"README.md", "pyproject.toml", "LICENSE", "Makefile", "docs/conf.py"} <= names
    if (ROOT / ".git").exists():
        needs("git")
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
        assert tracked - names == {name for name in tracked if name.startswith(".ci/")}


def test_wheel_is_the_packages_and_no_more(built: Built) -> None:
    """Else the types, a module or the licence would be missing, or tests be installed."""
    files = contents(built.wheel)
    modules = {
        str(path.relative_to(base))
        for base, package in ((ROOT, "discod"), (ROOT / "client", "disco_client"))
        for path in (base / package).rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert {"discod/py.typed", "disco_client/py.typed"} <= modules
    info = f"discod-{discod.__version__}.dist-info"
    theirs = {name for name in files if name.startswith(f"{info}/")}
    assert files.keys() - theirs == modules
    assert f"{info}/licenses/LICENSE" in theirs
    assert b"discod = discod.cli:main" in files[f"{info}/entry_points.txt"]


def test_sdist_gives_the_same_wheel_as_the_tree(built: Built, tmp_path: Path) -> None:
    """Else what is tested would not be what is released."""
    build(ROOT, tmp_path, "--wheel")
    (wheel,) = tmp_path.glob("*.whl")
    assert contents(wheel) == contents(built.wheel)


def test_the_version_has_one_source(built: Built) -> None:
    """Else two places could disagree on which version this is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "discod/__init__.py"
    info = f"discod-{discod.__version__}.dist-info/METADATA"
    metadata = Parser().parsestr(contents(built.wheel)[info].decode())
    assert metadata["Version"] == discod.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert built.sdist.name == f"discod-{discod.__version__}.tar.gz"


def test_an_index_would_take_them(built: Built) -> None:
    """Else the upload of a release would be refused, or its page show raw markup."""
    twine = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(twine, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def bare(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel and what it requires, without torch."""
    environment = Environment(tmp_path_factory.mktemp("bare") / "venv")
    link_packages(environment.site, declared())
    environment.install(built.wheel)
    return environment


@pytest.fixture
def directory(short_dir: Path) -> Path:
    """Where a shell is, with a scratch directory in it."""
    (short_dir / "nvme").mkdir()
    return short_dir


def test_the_daemon_runs_without_torch(bare: Environment, directory: Path) -> None:
    """Else its machine or image would need gigabytes, or a dependency that is not declared."""
    assert "No broken requirements" in bare.check()
    assert not (bare.site / "torch").exists()
    said = shell(bare.variables(), "discod --version", directory).stdout
    assert said == f"discod, version {discod.__version__}\n"
    with Service(bare.variables(), "discod --scratch nvme", directory):
        said = shell(bare.variables(), "discod status", directory).stdout
        assert f"discod {discod.__version__}" in said
        assert "no clients" in said
    assert os.listdir(directory / "nvme") == []


def test_the_client_says_what_it_lacks(bare: Environment, directory: Path) -> None:
    """Else a user would have to guess from "No module named 'torch'" what was left out."""
    for line in ("python -c 'import disco_client'", "python -m disco_client train.py"):
        done = shell(bare.variables(), line, directory)
        assert done.returncode == 1
        assert "pip install 'discod[torch]'" in done.stderr.splitlines()[-1], done.stderr
    spec = "from importlib.util import find_spec as f; print(f('torch'))"
    assert shell(bare.variables(), f'python -c "{spec}"', directory).stdout == "None\n"


def test_the_quickstart_in_a_new_environment(built: Built, tmp_path: Path, directory: Path) -> None:
    """Else the first thing that a new user does would fail, or not do what the page shows."""
    page = (DOCS / "quickstart.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (install, serve, train) = (block.splitlines() for block in blocks)
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^    (step \d): .*, (written \d+ MiB)$", page, re.MULTILINE)

    environment = Environment(tmp_path / "venv")
    link_packages(environment.site, declared("torch"))
    environment.install(built.wheel)
    # The page's first two lines make an environment and download; test_readme.py runs their like.
    assert shell(environment.variables(), install[2], directory).returncode == 0
    (directory / "train.py").write_text(script)
    with Service(environment.variables(), serve[0].replace("/nvme", "nvme"), directory):
        done = shell(environment.variables(), train[0], directory)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^(step \d): loss [\d.]+, (written \d+ MiB)$", done.stdout, re.MULTILINE)
    assert said[1:] == shown[1:]  # the first step has no plan yet
    assert len(said) == len(shown) == 3
