"""Training jobs that take turns: each system's ranks are processes of their own, told when to step.

So that malloc's state, the arena and whatever else a system keeps are its own, while all of them
meet the same machine in the same minutes.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.page_cache import cached_bytes
from tests.benchmarks.systems import AXOLOTL, WITH_ARENA, Attachment
from tests.benchmarks.trainer import Settings, StepReport
from tests.benchmarks.workloads import Workload

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
STEP_SECONDS = 600.0
END_SECONDS = 15.0
SAMPLE_SECONDS = 0.01

MALLOC: dict[str, dict[str, str]] = {
    "default": {},
    "warm": {
        # Nothing is given back to the kernel, which would have to find and clear it again.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(64 << 20),
    },
}
"""How the ranks' malloc treats freed memory (mallopt(3))."""


class JobFailed(Exception):
    """A rank ended, or said nothing; the text has what it said last."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Most that the ranks and their files held in the same moment.

    Attributes:
        total_bytes: Resident memory of the ranks and page cache of their files.
        cache_bytes: The page cache in that; None if the kernel does not tell.
    """

    total_bytes: int
    cache_bytes: int | None


class Job:
    """All ranks of one system.

    Args:
        system: Of :mod:`tests.benchmarks.systems`.
        workload: What they train.
        arena_bytes: Of each rank.
        socket_dir: The daemon's.
        folder: An empty directory on the file system to measure, for this job.
        malloc: Key of ``MALLOC``.
    """

    def __init__(
        self,
        system: str,
        workload: Workload,
        arena_bytes: int,
        socket_dir: Path,
        folder: Path,
        malloc: str,
    ) -> None:
        self.system = system
        self._log = folder / "log"
        self._files = folder / "files"
        self._files.mkdir()
        attachment = Attachment(
            arena_bytes=arena_bytes if system in WITH_ARENA else 0,
            socket_dir=str(socket_dir),
            min_bytes=min(1 << 20, workload.hidden_bytes),
            folder=str(self._files),
        )
        threads = max(1, (os.cpu_count() or 1) // workload.ranks)
        self._ranks = [
            self._start(
                Settings(system, workload, attachment, rank, threads, str(folder / "store")), malloc
            )
            for rank in range(workload.ranks)
        ]

    def wait_until_ready(self) -> None:
        """Until all ranks wait for their first step. Raises :class:`JobFailed`."""
        self._answers(START_SECONDS)

    def step(self, count: int) -> list[list[StepReport]]:
        """``count`` steps; for each, the reports of all ranks in their order.

        Raises:
            JobFailed: A rank ended, or did not finish in ``STEP_SECONDS``.
        """
        self._order(count)
        return self._reports(self._answers(STEP_SECONDS))

    def step_watched(self) -> tuple[list[StepReport], MemorySample]:
        """One step, in which memory and page cache are looked at all the time, which slows it.

        Raises:
            JobFailed: As :meth:`step`.
        """
        ranks = [psutil.Process(rank.pid) for rank in self._ranks]
        most = MemorySample(0, 0)

        def look() -> None:
            nonlocal most
            cache = cached_bytes(self._files) if self.system == AXOLOTL else 0
            with contextlib.suppress(psutil.NoSuchProcess):
                total = sum(rank.memory_info().rss for rank in ranks) + (cache or 0)
                if total > most.total_bytes:
                    most = MemorySample(total, cache)

        self._order(1)
        (reports,) = self._reports(self._answers(STEP_SECONDS, look))
        return reports, most

    def close(self) -> None:
        """Let the ranks end, and see that they do. Raises :class:`JobFailed` when one fails."""
        for rank in self._ranks:
            _close(rank)
        deadline = time.monotonic() + END_SECONDS
        codes = []
        for rank in self._ranks:
            try:
                codes.append(rank.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                rank.kill()
                codes.append(rank.wait())
        if any(codes):
            raise self._failed(f"the ranks ended with {codes}")

    def kill(self) -> None:
        """End it if it has not ended yet."""
        for rank in self._ranks:
            _close(rank)
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()

    def _start(self, settings: Settings, malloc: str) -> "subprocess.Popen[str]":
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        environment |= MALLOC[malloc] | {
            "GLOO_SOCKET_IFNAME": "lo",  # the ranks meet on this machine, whatever its name is
            "LOCAL_RANK": str(settings.rank),
            "LOCAL_WORLD_SIZE": str(settings.workload.ranks),
        }
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.trainer", settings.to_json()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _order(self, count: int) -> None:
        for rank in self._ranks:
            if rank.stdin is None:
                raise self._failed("the job is closed")
            try:
                rank.stdin.write(f"{count}\n")
                rank.stdin.flush()
            except BrokenPipeError:
                raise self._failed("a rank ended") from None

    def _answers(self, seconds: float, look: Callable[[], None] | None = None) -> list[str]:
        answers: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                if rank.stdout is not None:
                    selector.register(rank.stdout, selectors.EVENT_READ, number)
            while len(answers) < len(self._ranks):
                for key, _ in selector.select(SAMPLE_SECONDS if look else 1.0):
                    answers[key.data] = self._ranks[key.data].stdout.readline()
                    selector.unregister(key.fileobj)
                    if not answers[key.data]:
                        raise self._failed(f"rank {key.data} ended")
                if look is not None:
                    look()
                if time.monotonic() > deadline:
                    raise self._failed(f"nothing in {seconds:.0f} s")
        return [answers[number] for number in range(len(self._ranks))]

    def _reports(self, answers: Sequence[str]) -> list[list[StepReport]]:
        by_rank = [[StepReport(**step) for step in json.loads(answer)] for answer in answers]
        return [list(reports) for reports in zip(*by_rank, strict=True)]

    def _failed(self, what: str) -> JobFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ranks[0].wait(1.0)
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        return JobFailed(f"{self.system}: {what}\n{last}")


def _close(rank: "subprocess.Popen[str]") -> None:
    if rank.stdin is not None:
        with contextlib.suppress(OSError):
            rank.stdin.close()
