"""Trainer and daemon in containers of their own that share nothing but the socket directory."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from discod.exits import Exit
from discod.status import NoStatus, fetch_status
from tests.helpers.daemon import START_SECONDS, Daemon, eventually
from tests.helpers.jobs import ROOT
from tests.helpers.tools import needs
from tests.integration.conftest import privileged_or_skip

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--mount"]
PRIVATE_SHM = "mount -t tmpfs -o size=64k tmpfs /dev/shm"


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    """Skip where there are none."""
    privileged_or_skip("a container")
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare")


def container(setup: str, *more: str) -> list[str]:
    """A prefix: what follows runs as pid 1 of new namespaces, after ``setup``."""
    return [*UNSHARE, *more, "sh", "-c", f'{setup} && exec "$@"', "sh"]


def inner_pid(outer: int) -> int:
    """The child of ``unshare``, which is pid 1 inside, as it is known outside."""
    children = eventually(Path(f"/proc/{outer}/task/{outer}/children").read_text)
    return int(children.split()[0])


class Trainer:
    """A trainer that is pid 1 of its container."""

    def __init__(self, prefix: list[str], **settings: Any) -> None:
        self.process = subprocess.Popen(
            [
                *prefix,
                sys.executable,
                "-m",
                "tests.helpers.container_trainer",
                json.dumps(settings),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def report(self) -> dict[str, Any]:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self) -> dict[str, Any]:
        """Have it load what it holds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.report()

    def end(self) -> str:
        """Let it end by itself; what it said on stderr."""
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return err

    def close(self) -> None:
        """End it if it has not ended yet."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    """``trainer(prefix, **settings)``, ended after the test."""
    trainers: list[Trainer] = []

    def start(*args: Any, **kwargs: Any) -> Trainer:
        trainers.append(Trainer(*args, **kwargs))
        return trainers[-1]

    yield start
    for one in trainers:
        one.close()


def status(socket_dir: Path) -> dict[str, Any]:
    """The daemon's, or nothing."""
    with contextlib.suppress(NoStatus):
        found: dict[str, Any] = json.loads(fetch_status(socket_dir))
        return found
    return {}


@pytest.fixture
def contain(
    start_daemon: Callable[..., Daemon], socket_dir: Path
) -> Iterator[Callable[..., Daemon]]:
    """``contain(setup)``: a daemon that is pid 1, and is ready."""
    daemons: list[Daemon] = []

    def start(setup: str = PRIVATE_SHM) -> Daemon:
        daemons.append(start_daemon(prefix=container(setup), ready=False))
        eventually(lambda: status(socket_dir).get("pid") == 1, START_SECONDS, "the daemon's start")
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.kill()  # of unshare, which ignores SIGTERM; its child goes with it


@pytest.mark.parametrize("more", [(), ("--user", "--map-root-user")], ids=["root", "user"])
def test_train_and_be_killed(
    contain: Callable[..., Daemon],
    trainer: Callable[..., Trainer],
    scratch: Path,
    socket_dir: Path,
    more: tuple[str, ...],
) -> None:
    """Containers would have to share ipc, pids or /dev/shm, or leave memory behind when they die.

    SIGTERM to a daemon that is pid 1 would be ignored, and SIGKILL follow ten seconds later.
    """
    contained = contain(f"{PRIVATE_SHM} && mount -t tmpfs -o size=256m tmpfs {scratch}")
    prefix = container(PRIVATE_SHM, *more)
    one = trainer(prefix, socket_dir=str(socket_dir), then="crash")
    said = one.report()
    assert said["pid"] == 1
    assert said["equal"], "not the gradients of plain torch"
    assert said["written"] > 0, "nothing went through the disk"
    assert said["read"] > 0
    assert said["shm"] == []
    assert said["shm_bytes"] == 64 << 10, "/dev/shm is not its own"
    assert said["arena"]
    assert said["trackers"] == []
    before = status(socket_dir)
    assert before["ram_used_bytes"] == 4 << 20
    assert before["disk_used_bytes"] > 0
    os.kill(inner_pid(one.process.pid), signal.SIGKILL)
    began = time.monotonic()
    eventually(lambda: status(socket_dir)["clients"] == [])
    eventually(lambda: not status(socket_dir)["disk_used_bytes"])
    assert time.monotonic() - began < 1.0
    assert not status(socket_dir)["ram_used_bytes"]

    began = time.monotonic()
    os.kill(inner_pid(contained.pid), signal.SIGTERM)
    assert contained.wait() == Exit.OK
    assert time.monotonic() - began < 5
    assert os.listdir(socket_dir) == []


def test_sigterm_as_soon_as_it_listens(
    start_daemon: Callable[..., Daemon], socket_dir: Path
) -> None:
    """Process 1 never gets a signal that it has no handler for.

    So the stop of a container that has just started would be lost, and SIGKILL follow.
    """
    needs("strace")
    slowly = ["strace", "-D", "-o", "/dev/null", "-e", "inject=bind:delay_exit=500000"]
    daemon = start_daemon(prefix=[*container(PRIVATE_SHM), *slowly], ready=False)
    inside = inner_pid(daemon.pid)
    eventually((socket_dir / "attach.sock").exists, START_SECONDS, "the daemon's start")
    os.kill(inside, signal.SIGTERM)
    assert daemon.wait() == Exit.OK
    assert os.listdir(socket_dir) == []


def test_the_other_side_is_replaced(
    contain: Callable[..., Daemon], trainer: Callable[..., Trainer], socket_dir: Path
) -> None:
    """A daemon's container that is made anew would end the training, or crash it (SIGBUS).

    And what is in /dev/shm would be removed by logind at a logout: nothing of discod is there.
    """
    daemon = contain()
    one = trainer(container(PRIVATE_SHM), socket_dir=str(socket_dir), then="wait")
    assert one.report()["equal"]
    inside = inner_pid(one.process.pid)
    assert os.listdir(f"/proc/{inside}/root/dev/shm") == []
    os.kill(inner_pid(daemon.pid), signal.SIGKILL)
    daemon.wait()
    contain()
    assert one.ask() == {"loaded": 12, "zombies": 0}
    assert one.process.stdin is not None
    one.process.stdin.close()
    one.process.stdin = None
    assert "leaked" not in one.end()
    eventually(lambda: status(socket_dir)["clients"] == [])


def test_trainer_is_pid_1_and_starts_its_daemon(
    trainer: Callable[..., Trainer], scratch: Path, socket_dir: Path
) -> None:
    """Zombies would fill its container, or the next daemon not be started when one dies.

    The daemon ends with the container: the kernel kills what is left when pid 1 ends.
    """
    one = trainer(
        container(PRIVATE_SHM), socket_dir=str(socket_dir), scratch=str(scratch), then="wait"
    )
    said = one.report()
    assert said["pid"] == 1
    assert said["equal"]
    assert len(said["children"]) == 1
    assert one.ask() == {"loaded": 12, "zombies": 0}
    daemon = inner_pid(inner_pid(one.process.pid))
    os.kill(daemon, signal.SIGKILL)
    assert one.ask() == {"loaded": 12, "zombies": 0}
    second = inner_pid(inner_pid(one.process.pid))
    assert second != daemon
    os.kill(inner_pid(one.process.pid), signal.SIGKILL)
    one.process.wait(10)
    eventually(lambda: not Path(f"/proc/{second}").exists(), 5, "the end of its daemon")
    assert os.listdir(scratch) == []
