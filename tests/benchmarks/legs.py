"""Legs of the training benchmark: one workload with one arena, every system side by side.

A leg has a job for each system, all alive at once, which take turns in short blocks of steps, in
another order each round. The first step of a block warms up what went cold meanwhile and is not
counted. Ratios are taken within a round, to the system's own kind of plain checkpointing.
Gradients are compared bit by bit at every step.
"""

import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.benchmarks.frame import WrongBytes
from tests.benchmarks.jobs import Job, MemorySample
from tests.benchmarks.service import service
from tests.benchmarks.systems import ATTACHED, AXOLOTL, REFERENCE
from tests.benchmarks.trainer import StepReport
from tests.benchmarks.workers import DAEMON_OPTIONS
from tests.benchmarks.workloads import Workload
from tests.helpers.daemon import Daemon


@dataclass(frozen=True, slots=True)
class Leg:
    """What is run side by side.

    Attributes:
        share: Arena over activations.
        malloc: Key of ``jobs.MALLOC``.
        rounds: Blocks of each system.
        steps: Counted steps in a block.
    """

    workload: str
    share: float
    malloc: str
    systems: Sequence[str]
    rounds: int
    steps: int

    def without(self, systems: Collection[str]) -> "Leg":
        """The same leg, with those systems left out."""
        return replace(self, systems=[name for name in self.systems if name not in systems])


@dataclass(slots=True)
class Block:
    """The counted steps of one system in one round."""

    steps: list[list[StepReport]]
    daemon_cpu_seconds: float

    @property
    def seconds(self) -> float:
        """The median step's, of the slowest rank."""
        return median(max(report.seconds for report in step) for step in self.steps)


class Bench:
    """A daemon, and a directory on the file system to measure. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._legs = 0

    def __enter__(self) -> "Bench":
        with ExitStack() as cleanup:
            self._folder = Path(
                cleanup.enter_context(
                    tempfile.TemporaryDirectory(prefix="discod-bench-", dir=self._directory)
                )
            )
            self.daemon = cleanup.enter_context(service(self._folder, *DAEMON_OPTIONS))
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def run(
        self, leg: Leg, workload: Workload, progress: Callable[[str], None] = lambda text: None
    ) -> dict[str, Any]:
        """All rounds of ``leg``; what came out, ready for JSON.

        Raises:
            WrongBytes: Gradients differ, or bytes do not add up.
            WorkerFailed: A rank ended.
        """
        self._legs += 1
        arena_bytes = workload.arena_bytes(leg.share)
        name = f"{leg.workload}, arena {leg.share:.0%}, malloc {leg.malloc}"
        with ExitStack() as cleanup:
            jobs: list[Job] = []
            for system in leg.systems:
                folder = self._folder / f"leg{self._legs}-{len(jobs)}"
                folder.mkdir()
                job = Job(system, workload, arena_bytes, self.daemon.socket_dir, folder, leg.malloc)
                cleanup.callback(job.kill)
                jobs.append(job)
            for job in jobs:
                job.wait_until_ready()
            runs = {job.system: SystemRun(job) for job in jobs}
            for job in jobs:
                progress(f"{name}: {job.system}, first steps")
                runs[job.system].begin()
            for number in range(leg.rounds):
                turn = number % len(jobs)
                for job in jobs[turn:] + jobs[:turn]:
                    progress(f"{name}: round {number + 1} of {leg.rounds}, {job.system}")
                    runs[job.system].round(leg.steps, self.daemon)
            check_gradients(runs)
            check_daemon(runs, self.daemon)
            for job in jobs:
                job.close()
        return {
            "leg": asdict(leg),
            "workload": asdict(workload),
            "activation_bytes": workload.activation_bytes,
            "arena_bytes": arena_bytes,
            "systems": {system: summary(system, runs, workload) for system in leg.systems},
        }


class SystemRun:
    """One system's steps in a leg, in the order they were made."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.reports: list[list[StepReport]] = []
        self.blocks: list[Block] = []
        self.samples: list[MemorySample] = []

    def begin(self) -> None:
        """Two steps: memory is got, extents are made, the order is learned and then followed."""
        self.reports += self.job.step(2)

    def round(self, steps: int, daemon: Daemon) -> None:
        """One block."""
        report, sample = self.job.step_watched()
        self.reports.append(report)
        self.samples.append(sample)
        process = psutil.Process(daemon.pid)
        before = process.cpu_times()
        counted = self.job.step(steps)
        after = process.cpu_times()
        self.reports += counted
        cpu_seconds = after.user + after.system - before.user - before.system
        self.blocks.append(Block(counted, cpu_seconds))


def check_gradients(runs: dict[str, SystemRun]) -> None:
    """Every step's are those of the system's reference. Raises :class:`WrongBytes`."""
    for system, run in runs.items():
        reference = runs[REFERENCE[system]]
        for ours, theirs in zip(run.reports, reference.reports, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                if (a.gradients, a.loss) != (b.gradients, b.loss):
                    raise WrongBytes(
                        f"{system} differs from {reference.job.system} at step {a.step}: "
                        f"loss {a.loss!r} and {b.loss!r}"
                    )


def check_daemon(runs: dict[str, SystemRun], daemon: Daemon) -> None:
    """It has moved the bytes that its clients say it has. Raises :class:`WrongBytes`."""
    clients = daemon.status()["clients"]
    for name in ("written_bytes", "read_bytes"):
        moved = sum(client[name] for client in clients)
        said = sum(report.totals[name] for run in runs.values() for report in run.reports[-1])
        if moved != said:
            raise WrongBytes(f"{name}: {moved} by the daemon, {said} by the ranks")


def summary(system: str, runs: dict[str, SystemRun], workload: Workload) -> dict[str, Any]:
    """What the page needs of one system: lists by round, medians of the counters per rank."""
    run, reference = runs[system], runs[REFERENCE[system]]
    counted = [report for block in run.blocks for step in block.steps for report in step]
    result: dict[str, Any] = {
        "reference": REFERENCE[system],
        "seconds": [block.seconds for block in run.blocks],
        "ratios": [
            ours.seconds / theirs.seconds
            for ours, theirs in zip(run.blocks, reference.blocks, strict=True)
        ],
        "cpu_seconds": median(report.cpu_seconds for report in counted),
        "peak_bytes": max(report.peak_bytes for report in counted),
    }
    if system == AXOLOTL:
        most = max(run.samples, key=lambda sample: sample.total_bytes)
        cached = most.cache_bytes
        result["cache_bytes"] = None if cached is None else cached // workload.ranks
        result["peak_bytes"] = max(result["peak_bytes"], most.total_bytes // workload.ranks)
        for name in ("write_bytes", "cancelled_write_bytes", "read_bytes"):
            result[name] = median(report.file_bytes[name] for report in counted)
    if system in ATTACHED:
        steps = sum(len(block.steps) for block in run.blocks)
        result["daemon_cpu_seconds"] = sum(b.daemon_cpu_seconds for b in run.blocks) / steps
        for name in counted[0].traffic or {}:
            result[name] = median((report.traffic or {})[name] for report in counted)
        result["overflow_bytes"] = max(0, result["saved_bytes"] - run.job.arena_bytes)
    return result
