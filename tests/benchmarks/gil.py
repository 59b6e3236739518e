"""The GIL: what is left of the trainer's main thread while another one offloads.

Each system is a process of its own, which runs two probes in its main thread: pure-Python work,
and waking every millisecond. Windows without a load stand before and after those with one, so that
a ratio is to the same process at the same time. Every tensor that comes back is checked.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks import axolotl_disco
from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions
from tests.benchmarks.offloader import FULL, IDLE, PACED, WAKE, WORK, Seen, Settings, Window
from tests.benchmarks.service import service
from tests.benchmarks.spread import show, spread
from tests.benchmarks.systems import AXOLOTL
from tests.benchmarks.workers import DAEMON_OPTIONS, Worker, answers

DISCOD = "discod"
SYSTEMS = (AXOLOTL, DISCOD)
LOADS = (FULL, PACED)
GOAL_WORK = 0.97
START_SECONDS = 120.0
GRACE_SECONDS = 120.0
"""For the cycle that is under way when a window ends."""
LATE = ("late_p50_seconds", "late_p99_seconds", "late_worst_seconds")
INTRODUCTION = (
    "Medians of the rounds. A full rate beside a main thread that never sleeps needs more than "
    "two cores, so the work lost is split by its cause, as the kernel accounts for it: waiting "
    "for a core, or blocked, which is the GIL in as far as it is above the idle row's.\n"
)
HEADER = (
    "| | | work over idle | waited for a core | blocked | late p50, p99, worst, ms "
    "| longest stall, ms | moved, GB/s |\n|---|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        window_seconds: Of each probe in each window.
        blobs: In a cycle; the arena has room for a quarter.
    """

    systems: Sequence[str]
    rounds: int
    window_seconds: float
    blob_bytes: int = 8 << 20
    blobs: int = 16
    paced_bytes_per_second: float = 0.5e9


class Gil:
    """The benchmark."""

    name = "gil"
    title = "The main thread beside offloading"

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        """Raises: as :func:`measure`."""
        missing = {}
        try:
            axolotl_disco.find()
        except axolotl_disco.NotInstalled as error:
            missing[AXOLOTL] = str(error)
        plan = Plan(
            systems=[system for system in SYSTEMS if system not in missing],
            rounds=8 if options.full else 3,
            window_seconds=1.0 if options.full else 0.5,
        )
        return measure(plan, options.directory, progress) | {"missing": missing}

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        """Python's throughput; the worst stall is only stated."""
        work = spread(work_ratios(result, DISCOD, FULL))
        return [
            Goal(
                f"pure-Python work of the main thread beside discod at full rate at least "
                f"{GOAL_WORK} of idle",
                show(work),
                work["median"] >= GOAL_WORK,
            )
        ]

    def markdown(self, result: dict[str, Any]) -> str:
        """Work, lateness, stalls and bytes of each system and load."""
        parts = [
            f"{system} could not be run: {reason}.\n"
            for system, reason in result["missing"].items()
        ]
        rows = [
            _row(result, system, load)
            for system in result["plan"]["systems"]
            for load in (IDLE, *LOADS)
        ]
        return "\n".join([INTRODUCTION, *parts, HEADER + "".join(rows)])

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        """Late wake-ups by percentile."""
        series = {
            system: [
                (words, median(figures(result, system, FULL, WAKE, name)) * 1e3)
                for words, name in zip(("median", "99 %", "worst"), LATE, strict=True)
            ]
            for system in result["plan"]["systems"]
        }
        return [
            Plot(
                name="gil-late",
                title="The main thread's wake-ups beside offloading at full rate",
                x_label="",
                y_label="ms late",
                series=series,
            )
        ]


def measure(plan: Plan, directory: Path, progress: Progress = lambda text: None) -> dict[str, Any]:
    """All rounds; by system, load and probe, a list of what was seen.

    Raises:
        WorkerFailed: A process ended, for one because what was loaded is not what was saved.
    """
    with ExitStack() as cleanup:
        folder = Path(
            cleanup.enter_context(
                tempfile.TemporaryDirectory(prefix="discod-bench-", dir=directory)
            )
        )
        sockets = cleanup.enter_context(service(folder, *DAEMON_OPTIONS)).socket_dir
        workers = {}
        for number, system in enumerate(plan.systems):
            files = folder / f"files{number}"
            files.mkdir()
            settings = Settings(
                system=system,
                blob_bytes=plan.blob_bytes,
                blobs=plan.blobs,
                arena_bytes=plan.blobs // 4 * plan.blob_bytes,
                socket_dir=str(sockets),
                folder=str(files),
                paced_bytes_per_second=plan.paced_bytes_per_second,
            )
            worker = Worker(
                "tests.benchmarks.offloader", json.dumps(asdict(settings)), sockets / f"log{number}"
            )
            cleanup.callback(worker.kill)
            workers[system] = worker
        answers(list(workers.values()), START_SECONDS)
        rounds = []
        for number in range(plan.rounds):
            turn = number % len(workers)
            systems = [*plan.systems[turn:], *plan.systems[:turn]]
            progress(f"round {number + 1} of {plan.rounds}")
            rounds.append({system: _round(workers[system], plan) for system in systems})
        for worker in workers.values():
            worker.close()
    return {"plan": asdict(plan), "rounds": rounds}


def _round(worker: Worker, plan: Plan) -> dict[str, dict[str, list[dict[str, float]]]]:
    """For each load and probe: idle, loaded, idle."""
    return {
        load: {
            probe: [
                asdict(_look(worker, Window(which, probe, plan.window_seconds)))
                for which in (IDLE, load, IDLE)
            ]
            for probe in (WORK, WAKE)
        }
        for load in LOADS
    }


def _look(worker: Worker, window: Window) -> Seen:
    worker.tell(window.to_json())
    (line,) = answers([worker], window.seconds + GRACE_SECONDS)
    return Seen(**json.loads(line))


def work_ratios(result: dict[str, Any], system: str, load: str) -> list[float]:
    """Pure-Python work done over idle, by round."""
    ratios = []
    for one in result["rounds"]:
        before, loaded, after = (seen["units_per_second"] for seen in one[system][load][WORK])
        ratios.append(2 * loaded / (before + after))
    return ratios


def figures(result: dict[str, Any], system: str, load: str, probe: str, name: str) -> list[float]:
    """A field of :class:`Seen` by round; with ``load`` IDLE, that before the full rate."""
    at = 0 if load == IDLE else 1
    which = FULL if load == IDLE else load
    return [one[system][which][probe][at][name] for one in result["rounds"]]


def _row(result: dict[str, Any], system: str, load: str) -> str:
    def of(probe: str, name: str) -> float:
        return median(figures(result, system, load, probe, name))

    ran, queued = of(WORK, "cpu_share"), of(WORK, "queued_share")
    work = "1" if load == IDLE else show(spread(work_ratios(result, system, load)))
    cells = [
        system,
        load,
        work,
        f"{queued:.1%}",
        f"{max(0.0, 1 - ran - queued):.1%}",
        ", ".join(f"{of(WAKE, name) * 1e3:.2f}" for name in LATE),
        f"{of(WORK, 'late_worst_seconds') * 1e3:.1f}",
        f"{of(WORK, 'bytes_per_second') / 1e9:.2f}",
    ]
    return "| " + " | ".join(cells) + " |\n"
