"""Processes that are told by lines on stdin what to do next, and answer each with one line."""

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
END_SECONDS = 15.0
LOOK_SECONDS = 0.01
CHECK_SECONDS = 1.0
DAEMON_OPTIONS = ("--exit-idle", "600")
"""For the daemon that workers attach to: a benchmark that is killed leaves none behind for long."""


class WorkerFailed(Exception):
    """A worker ended, or said nothing; the text has what it said last."""


class Worker:
    """``python -m MODULE SETTINGS``. It is ready when it has answered once, unasked.

    Args:
        module: See above.
        settings: Its one argument.
        log: File that gets its stderr.
        environment: In place of this process's own.
    """

    def __init__(
        self, module: str, settings: str, log: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._log = log
        self._name = module.rpartition(".")[2]
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, settings],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.pid = self._process.pid

    def fileno(self) -> int:
        """What is readable when it answers."""
        return self._stdout.fileno()

    def tell(self, line: str) -> None:
        """Raises :class:`WorkerFailed` when it has ended."""
        stdin = self._process.stdin
        try:
            if stdin is None or stdin.closed:
                raise BrokenPipeError
            stdin.write(f"{line}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            raise self.failed("it ended") from None

    def readline(self) -> str:
        """Its answer, once it has begun to give one. Raises as :meth:`tell`."""
        line = self._stdout.readline()
        if not line.endswith(b"\n"):
            raise self.failed("it ended")
        return line.decode()

    def end(self) -> None:
        """Tell it to end, without waiting for that."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """Let it end. Raises :class:`WorkerFailed` when it fails, or does not end."""
        self.end()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise self.failed("it does not end") from None
        if code:
            raise self.failed(f"it ended with {code}")

    def kill(self) -> None:
        """End it if it has not ended yet."""
        self.end()
        self._process.kill()
        self._process.wait()
        self._stdout.close()

    def failed(self, what: str) -> WorkerFailed:
        """The error, with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CHECK_SECONDS)  # so that its last words are there
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        return WorkerFailed(f"{self._name} {self.pid}: {what}\n{last}")

    @property
    def _stdout(self) -> IO[bytes]:
        if self._process.stdout is None:
            raise ValueError("the worker was started without a pipe")
        return self._process.stdout


def answers(
    workers: Sequence[Worker], seconds: float, look: Callable[[], None] | None = None
) -> list[str]:
    """One answer of each.

    Args:
        workers: Who was told something.
        seconds: How long that may take.
        look: Called again and again until then.

    Raises:
        WorkerFailed: One ended, or did not answer in time.
    """
    found: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for number, worker in enumerate(workers):
            selector.register(worker, selectors.EVENT_READ, number)
        while len(found) < len(workers):
            for key, _ in selector.select(CHECK_SECONDS if look is None else LOOK_SECONDS):
                found[key.data] = workers[key.data].readline()
                selector.unregister(key.fileobj)
            if look is not None:
                look()
            if time.monotonic() > deadline:
                silent = next(i for i in range(len(workers)) if i not in found)
                raise workers[silent].failed(f"it said nothing in {seconds:.0f} s")
    return [found[number] for number in range(len(workers))]


@contextlib.contextmanager
def answering() -> Iterator[Callable[[str], None]]:
    """In a worker: what sends an answer. All else that is printed goes to stderr meanwhile."""
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        yield lambda line: print(line, file=stdout, flush=True)
