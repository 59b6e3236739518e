"""The demo's processes: a daemon of its own, and two torchrun jobs that take turns.

Each job keeps its processes for the whole demo, so that its peak memory is its own; the steps
alternate between the jobs, so that whatever else the machine does hits both. All of it ends with
the demo, however that ends: torchrun and the daemon are told to, and should the demo be killed, the
ranks see their connection close, and the daemon leaves when it has had no client for a while.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.demo.messages import Settings, StepReport

START_SECONDS = 60.0
"""For the ranks to import torch and connect, on a machine that is busy with something else."""
STEP_SECONDS = 600.0
END_SECONDS = 15.0
POLL_SECONDS = 0.1
EXIT_IDLE_SECONDS = 60

TRAINER_ENVIRONMENT = {
    # torchrun would set it, with a warning; torch.set_num_threads() overrides it.
    "OMP_NUM_THREADS": "1",
    # Both jobs alike: every tensor is its own mapping, so that freed memory is really free, and of
    # huge pages, so that this costs little. glibc's own heap would keep two to three times what is
    # in use, through fragmentation, and its peak would say nothing.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
    # The ranks meet on this machine only, whatever its name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
}


class DemoFailed(Exception):
    """A process of the demo failed; the text says which, and what it said last."""


class Place:
    """The demo's temporary directories, the daemon and the jobs; a context manager.

    Args:
        scratch: Directory in which the scratch directory is made; it should be on the NVMe disk.
    """

    daemon: subprocess.Popen[bytes]
    socket_dir: Path

    def __init__(self, scratch: Path) -> None:
        self._parent = scratch

    def __enter__(self) -> "Place":
        with contextlib.ExitStack() as cleanup:
            self.socket_dir = _temporary(cleanup, Path(tempfile.gettempdir()))
            self._logs = self.socket_dir / "logs"
            self._logs.mkdir()
            self.daemon = self._start_daemon(cleanup, _temporary(cleanup, self._parent))
            self._listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(self.socket_dir / "demo.sock"))
            self._listener.listen()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _start_daemon(
        self, cleanup: contextlib.ExitStack, scratch: Path
    ) -> subprocess.Popen[bytes]:
        command = ["-m", "discod", "--scratch", str(scratch), "--socket-dir", str(self.socket_dir)]
        command += ["--exit-idle", str(EXIT_IDLE_SECONDS)]
        daemon = self._start("daemon", command, cleanup, {})
        deadline = time.monotonic() + START_SECONDS
        while self.status() is None:
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the daemon did not start\n{_tail(self._logs / 'daemon')}")
            time.sleep(POLL_SECONDS)
        return daemon

    def check_daemon(self) -> None:
        """Raises :class:`DemoFailed` when the daemon has ended; the ranks would wait for it."""
        if self.daemon.poll() is not None:
            raise DemoFailed(f"the daemon ended\n{_tail(self._logs / 'daemon')}")

    def status(self) -> dict[str, Any] | None:
        """What ``discod status --json`` says; None if there is no daemon."""
        command = ["-m", "discod", "status", "--json", "--socket-dir", str(self.socket_dir)]
        answer = subprocess.run(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=START_SECONDS,
        )
        if answer.returncode != 0:
            return None
        status: dict[str, Any] = json.loads(answer.stdout)
        return status

    def start_jobs(self, variants: tuple[str, ...], ranks: int, settings: Settings) -> list["Job"]:
        """Start a torchrun job for each variant, and wait until all their ranks have connected."""
        jobs = [self._start_job(variant, ranks, settings) for variant in variants]
        deadline = time.monotonic() + START_SECONDS
        self._listener.settimeout(POLL_SECONDS)
        while any(len(job.ranks) < ranks for job in jobs):
            with contextlib.suppress(TimeoutError):
                rank = Rank(self._listener.accept()[0])
                self._cleanup.callback(rank.close)
                variant, number = rank.readline().split()
                job = next(job for job in jobs if job.variant == variant)
                job.ranks[int(number)] = rank
            for job in jobs:
                if job.process.poll() is not None or time.monotonic() > deadline:
                    raise job.failed("a rank did not start")
        return jobs

    def _start_job(self, variant: str, ranks: int, settings: Settings) -> "Job":
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "examples.demo.trainer", "--variant", variant]
        command += ["--conductor", str(self.socket_dir / "demo.sock")]
        command += ["--settings", settings.to_json()]
        process = self._start(variant, command, self._cleanup, TRAINER_ENVIRONMENT)
        return Job(self, variant, process, self._logs / variant)

    def _start(
        self,
        name: str,
        command: list[str],
        cleanup: contextlib.ExitStack,
        environment: dict[str, str],
    ) -> subprocess.Popen[bytes]:
        """Start Python with ``command``, away from the terminal's Ctrl-C, and end it in cleanup."""
        own = {key: value for key, value in os.environ.items() if not key.startswith("DISCOD_")}
        own["TMPDIR"] = str(self._logs)  # torchrun leaves directories behind
        with (self._logs / name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=own | environment,
                start_new_session=True,
            )
        cleanup.callback(_end, process)
        return process


class Rank:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self.connection = connection
        self._lines = connection.makefile("r")

    def order_step(self) -> None:
        self.connection.sendall(b"step\n")

    def readline(self) -> str:
        """The next line that the rank sends; empty when it has ended."""
        return self._lines.readline()

    def close(self) -> None:
        """Let the rank end."""
        self._lines.close()
        self.connection.close()


class Job:
    """One torchrun job: its ranks do a step each time they are told to."""

    def __init__(
        self, place: Place, variant: str, process: subprocess.Popen[bytes], log: Path
    ) -> None:
        self.variant = variant
        self.process = process
        self.ranks: dict[int, Rank] = {}
        self._place = place
        self._log = log

    def step(self) -> list[StepReport]:
        """One step of all ranks; their reports in rank order.

        Raises:
            DemoFailed: A rank ended, or did not finish in ``STEP_SECONDS``.
        """
        reports: dict[int, str] = {}
        deadline = time.monotonic() + STEP_SECONDS
        with selectors.DefaultSelector() as selector:
            for number, rank in self.ranks.items():
                try:
                    rank.order_step()
                except OSError as error:
                    raise self.failed(f"rank {number} ended") from error
                selector.register(rank.connection, selectors.EVENT_READ, number)
            while len(reports) < len(self.ranks):
                for key, _ in selector.select(POLL_SECONDS):
                    reports[key.data] = self.ranks[key.data].readline()
                    selector.unregister(key.fileobj)
                    if not reports[key.data]:
                        raise self.failed(f"rank {key.data} ended")
                self._place.check_daemon()
                if time.monotonic() > deadline:
                    raise self.failed(f"a step took more than {STEP_SECONDS:.0f} s")
        return [StepReport.from_json(reports[number]) for number in sorted(reports)]

    def finish(self) -> None:
        """Let the ranks end. Raises :class:`DemoFailed` when that fails."""
        for rank in self.ranks.values():
            rank.close()
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise self.failed("the ranks do not end") from None
        if code != 0:
            raise self.failed(f"torchrun ended with {code}")

    def failed(self, what: str) -> DemoFailed:
        """The error for this job, with what its ranks said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)  # torchrun reports a rank's end a little later
        return DemoFailed(f"{what} (job: {self.variant})\n{_tail(self._log)}")


def _temporary(cleanup: contextlib.ExitStack, parent: Path) -> Path:
    path = Path(tempfile.mkdtemp(prefix="discod-demo-", dir=parent))
    cleanup.callback(shutil.rmtree, path, ignore_errors=True)
    return path


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which torchrun passes on to its ranks; SIGKILL when that does not help."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``SystemExit``, so that they clean up as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
