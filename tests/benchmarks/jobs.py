"""Training jobs that take turns: each system's ranks are processes of their own, told when to step.

So that malloc's state, the arena and whatever else a system keeps are its own, while all of them
meet the same machine in the same minutes.
"""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.page_cache import cached_bytes
from tests.benchmarks.systems import ATTACHED, AXOLOTL, COPIES, FITS, Attachment
from tests.benchmarks.trainer import Settings, StepReport
from tests.benchmarks.workers import Worker, answers
from tests.benchmarks.workloads import Workload

START_SECONDS = 120.0
STEP_SECONDS = 600.0

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
        arena_bytes: Of each rank, but for the controls that need room for all.
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
        if system in (COPIES, FITS):
            arena_bytes = workload.arena_bytes(1.0)
        self.arena_bytes = arena_bytes if system in (*ATTACHED, COPIES) else 0
        attachment = Attachment(
            arena_bytes=self.arena_bytes,
            hidden_bytes=workload.hidden_bytes,
            socket_dir=str(socket_dir),
            min_bytes=min(1 << 20, workload.hidden_bytes),
            folder=str(self._files),
        )
        threads = workload.threads or max(1, (os.cpu_count() or 1) // workload.ranks)
        self._ranks = [
            self._start(
                Settings(system, workload, attachment, rank, threads, str(folder / "store")), malloc
            )
            for rank in range(workload.ranks)
        ]

    def wait_until_ready(self) -> None:
        """Until all ranks wait for their first step. Raises :class:`WorkerFailed`."""
        answers(self._ranks, START_SECONDS)

    def step(self, count: int) -> list[list[StepReport]]:
        """``count`` steps; for each, the reports of all ranks in their order.

        Raises:
            WorkerFailed: A rank ended, or did not finish in ``STEP_SECONDS``.
        """
        return self._step(count, None)

    def step_watched(self) -> tuple[list[StepReport], MemorySample]:
        """One step, in which memory and page cache are looked at all the time, which slows it.

        Raises:
            WorkerFailed: As :meth:`step`.
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

        (reports,) = self._step(1, look)
        return reports, most

    def close(self) -> None:
        """Let the ranks end, and see that they do. Raises :class:`WorkerFailed`."""
        for rank in self._ranks:
            rank.end()
        for rank in self._ranks:
            rank.close()

    def kill(self) -> None:
        """End it if it has not ended yet."""
        for rank in self._ranks:
            rank.kill()

    def _start(self, settings: Settings, malloc: str) -> Worker:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        environment |= MALLOC[malloc] | {
            "GLOO_SOCKET_IFNAME": "lo",  # the ranks meet on this machine, whatever its name is
            "LOCAL_RANK": str(settings.rank),
            "LOCAL_WORLD_SIZE": str(settings.workload.ranks),
        }
        return Worker("tests.benchmarks.trainer", settings.to_json(), self._log, environment)

    def _step(self, count: int, look: Callable[[], None] | None) -> list[list[StepReport]]:
        for rank in self._ranks:
            rank.tell(str(count))
        lines = answers(self._ranks, STEP_SECONDS, look)
        by_rank = [[StepReport(**step) for step in json.loads(line)] for line in lines]
        return [list(reports) for reports in zip(*by_rank, strict=True)]
