"""The README's sections "Install" and "Use", run word for word in a new environment.

The short form is in the suite: the same lines of the same shell, with pip told by its environment
to download nothing, since the packages are linked from the environment of the tests; ``make demo``
and the lines that begin more processes are left to ``test_demo.py`` and ``test_runner.py``. With
DISCOD_TEST_LONG=1 nothing is left out: a clone, pip's own downloads, ``make demo``, eight ranks.
Only ``/nvme`` is another directory in both.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.environments import declared, link_packages
from tests.helpers.jobs import ROOT
from tests.helpers.shells import Service, shell
from tests.helpers.tools import needs

LONG = os.environ.get("DISCOD_TEST_LONG") == "1"
README = (ROOT / "README.md").read_text()
BUILDS = "hatchling>=1.26"
"""What pip would download to build with."""
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""pip's way to say --no-build-isolation is the value that says no."""


def blocks(section: str, language: str) -> list[str]:
    """The code blocks of a section, subsections included."""
    text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def clone(path: Path) -> None:
    """What a clone of this tree has: what git tracks, as it is now, or knows to be new."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes((ROOT / name).read_bytes())


def stand_in(path: Path) -> Path:
    """A directory in which ``python3`` is the Python that runs the tests, outside of any venv."""
    path.mkdir()
    shim = path / "python3"
    shim.write_text(f'#!/bin/sh\nexec "{os.path.realpath(sys.executable)}" "$@"\n')
    shim.chmod(0o755)
    return path


@pytest.mark.timeout(3600 if LONG else 120)
def test_install_and_use_word_for_word(short_dir: Path, tmp_path: Path) -> None:
    """Else the first lines that a user copies would fail, or print what the README does not say."""
    needs("git")
    scratch = short_dir / "nvme"
    scratch.mkdir()
    repository = short_dir / "clone"
    clone(repository)
    (install,) = blocks("Install", "sh")
    makes, installs, demo = install.splitlines()
    serve, train, ranks, *frameworks = "".join(blocks("Use", "sh")).splitlines()
    (script,) = blocks("Use", "python")

    own = ("DISCOD_", "PIP_NO", "PYTHON", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}

    def run(line: str, where: Path, timeout: float = 100) -> str:
        """A line in a shell that has gone through the lines before it."""
        activate = "" if line == makes else f". {repository}/venv/bin/activate && "
        done = shell(variables, activate + line.replace("/nvme", str(scratch)), where, timeout)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    if not LONG:
        # The packages are this Python's, and python3 may be another one.
        variables["PATH"] = f"{stand_in(short_dir / 'bin')}:{variables['PATH']}"
    run(makes, repository)
    if not LONG:
        (site,) = (repository / "venv").glob("lib/python*/site-packages")
        link_packages(site, [*declared("torch"), BUILDS])
        variables |= OFFLINE
    run(installs, repository, 1800)
    if LONG:
        assert "gradients bit-equal" in run(demo, repository, 1800)
    work = short_dir / "work"  # the clone is not in its way
    work.mkdir()
    (work / "train.py").write_text(script)
    active = variables | {"PATH": f"{repository}/venv/bin:{variables['PATH']}"}
    with Service(active, serve.replace("/nvme", str(scratch)), work):
        said = run(train, work)
        if LONG:
            assert run(ranks, work, 300).count("Counters(saved_blobs=8,") == 8
            for line in frameworks:
                assert "Counters(saved_blobs=8," in run(line, work)
    (shown,) = re.findall(r"^    (Counters\(.*), \.\.\.\)$", README, re.MULTILINE)
    assert said.startswith(shown)
    assert f"saved_bytes={8 * 4096 * 1024 * 4}" in shown
    assert os.listdir(scratch) == []
