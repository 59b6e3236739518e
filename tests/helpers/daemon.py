"""A real daemon process under test."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from discod.status import NoStatus, fetch_status

START_SECONDS = 20.0
"""A start takes 0.2 s; the machines that run the tests are small and busy."""

T = TypeVar("T")


def eventually(probe: Callable[[], T], timeout: float = 10.0, what: str = "it") -> T:
    """The first true value of ``probe``, which is tried again until the deadline."""
    deadline = time.monotonic() + timeout
    while not (value := probe()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s: {value!r}"
        time.sleep(0.005)
    return value


def shm_entries() -> set[str]:
    """What is in ``/dev/shm``, but for what torch and multiprocessing leave there for a time.

    Other tests run at the same time, and theirs are such.
    """
    theirs = ("torch_", "sem.", "psm_", "gloo", "__KMP")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(theirs)}


class Daemon:
    """``discod`` in a process of its own.

    Args:
        args: More options.
        scratch: One directory or several.
        socket_dir: The socket directory.
        log_path: Where its stderr goes.
        prefix: A command that execs the daemon, such as ``unshare``.
        env: More environment.
        pass_fds: What it inherits, for ``prefix`` to do something with.
    """

    def __init__(
        self,
        *args: str,
        scratch: Path | Sequence[Path],
        socket_dir: Path,
        log_path: Path,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        directories = [scratch] if isinstance(scratch, Path) else list(scratch)
        self.scratch = directories[0] if directories else Path()
        self.socket_dir = socket_dir
        self._log_path = log_path
        command = [*prefix, sys.executable, "-m", "discod", "--socket-dir", str(socket_dir)]
        for directory in directories:
            command += ["--scratch", str(directory)]
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(env or {}),
                pass_fds=tuple(pass_fds),
            )
        self.pid = self._process.pid

    def wait_until_ready(self) -> None:
        """Until it accepts clients; fails when it ends instead."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if self.status()["pid"] == self.pid:
                    return
            except NoStatus:
                pass
            assert self._process.poll() is None, f"the daemon ended: {self.log}"
            assert time.monotonic() < deadline, f"the daemon is not ready: {self.log}"
            time.sleep(0.01)

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log_path.read_text()

    def status(self) -> dict[str, Any]:
        """What ``discod status --json`` prints."""
        status: dict[str, Any] = json.loads(fetch_status(self.socket_dir))
        return status

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self._process.terminate()

    def wait(self, timeout: float = 10.0) -> int:
        """Its exit code."""
        return self._process.wait(timeout)

    def close(self) -> None:
        """End it if it has not ended yet."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
