"""Slurm's prolog and epilog, with Slurm's variables and a real daemon for the job."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from discod.status import NoStatus, fetch_status
from tests.helpers.daemon import eventually
from tests.helpers.jobs import ROOT
from tests.helpers.tools import needs
from tests.helpers.users import as_user, python_as
from tests.integration.conftest import privileged_or_skip

SLURM = ROOT / "docker" / "slurm"
USER = 4711
PATHS = [str(ROOT), str(ROOT / "client")]
WRITE = """
import os, sys; sys.path[:0] = sys.argv[1:]
from discod.wire.messages import Done
from pathlib import Path
from tests.helpers.raw_client import RawClient
client = RawClient(Path(os.environ["DISCOD_SOCKET_DIR"]))
print(type(client.write(0, 0, 4096)).__name__, type(client.read(0, 4096, 4096)).__name__)
"""


class Node:
    """A node with these scripts, on which one job runs.

    Args:
        folder: For all that a node would have in other places.
        discod: The program that the prolog starts.
    """

    def __init__(self, folder: Path, discod: Path) -> None:
        self.scratch = folder / "nvme"
        self.run = folder / "run"
        self.log = folder / "log"
        self.scratch.mkdir()
        self._environment = {
            "DISCOD": str(discod),
            "SCRATCH_ROOT": str(self.scratch),
            "RUN_ROOT": str(self.run),
            "LOG_ROOT": str(self.log),
            "OPTIONS": "--ram 64MiB",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_UID": str(USER),
            "SLURM_JOB_GID": str(USER),
        }

    def script(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one as slurmd does: with Slurm's variables and no search path."""
        return subprocess.run(
            [SLURM / name],
            env=self._environment | environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )

    @property
    def sockets(self) -> Path:
        return self.run / "17" / "sockets"

    @property
    def pid(self) -> int:
        return int((self.run / "17" / "pid").read_text())


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    """A node on which no job's daemon stays behind."""
    privileged_or_skip("a prolog")
    needs("setpriv")
    short_dir.chmod(0o755)
    program = short_dir / "discod"
    # Its interpreter need not be one that others find their way to: the kernel starts it at once.
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {PATHS!r}\n"
        "from discod.cli import main\nmain(prog_name='discod')\n"
    )
    program.chmod(0o755)
    node = Node(short_dir, program)
    yield node
    node.script("epilog.sh")


def test_a_job(node: Node) -> None:
    """A job would find no daemon, or one of root's; or it would outlive the job with its files."""
    said = node.script("prolog.sh")
    assert said.stderr == "", node.log
    pid = node.pid
    assert os.stat(f"/proc/{pid}").st_uid == USER
    assert b"SLURM" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getsid(pid) == pid
    exports = node.script("task-prolog.sh").stdout
    assert exports == f"export DISCOD_SOCKET_DIR={node.sockets}\n"
    name, _, value = exports.removeprefix("export ").strip().partition("=")
    task = ["env", f"{name}={value}", *as_user(USER)]
    assert python_as(task, WRITE, *PATHS) == "Done Done\n"
    assert node.script("epilog.sh").stderr == ""
    eventually(lambda: not Path(f"/proc/{pid}").exists(), what="its end")
    assert os.listdir(node.scratch) == []
    assert os.listdir(node.run) == []
    assert "discod ends" in (node.log / "job-17.log").read_text()
    assert node.script("epilog.sh").stderr == ""  # Slurm may run it again
    assert node.script("task-prolog.sh").stdout == ""


def test_no_daemon_can_start(node: Node) -> None:
    """A node would be taken out of service, or a job wait ten seconds for nothing."""
    said = node.script("prolog.sh", OPTIONS="--threads 1")
    assert "no daemon for this job" in said.stderr
    assert "--threads 1" in (node.log / "job-17.log").read_text()
    with pytest.raises(NoStatus):
        fetch_status(node.sockets)


@pytest.mark.parametrize("job", ["", "17; x", "../17"])
def test_strange_variables(node: Node, job: str) -> None:
    """The epilog would remove what is not the job's."""
    for name in ("prolog.sh", "epilog.sh"):
        assert "no number" in node.script(name, SLURM_JOB_ID=job).stderr
    assert not node.run.exists()


def test_pid_of_another_process(node: Node) -> None:
    """The epilog of a job whose daemon has died would end whoever has its pid now."""
    node.script("prolog.sh")
    pid = node.pid
    other = subprocess.Popen(["sleep", "60"])
    try:
        (node.run / "17" / "pid").write_text(f"{other.pid}\n")
        node.script("epilog.sh")
        assert other.poll() is None
        assert not node.sockets.exists()
    finally:
        other.kill()
        other.wait()
        os.kill(pid, 15)
    eventually(lambda: not Path(f"/proc/{pid}").exists(), what="its end")
