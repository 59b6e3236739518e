"""The GIL: what is left of the trainer's main thread while another one offloads.

Each system is a process of its own, which runs two probes in its main thread: pure-Python work,
and waking every millisecond. Windows without a load stand before and after those with one, so that
a ratio is to the same process at the same time. Every tensor that comes back is checked.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.offloader import FULL, IDLE, PACED, WAKE, WORK, Seen, Settings, Window
from tests.benchmarks.workers import Worker, answers
from tests.helpers.daemon import Daemon

DISCOD = "discod"
LOADS = (FULL, PACED)
GOAL_WORK = 0.97
START_SECONDS = 120.0
GRACE_SECONDS = 120.0
"""For the cycle that is under way when a window ends."""


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


def measure(
    plan: Plan, directory: Path, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
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
        sockets = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="discod-bench-")))
        (folder / "scratch").mkdir()
        daemon = Daemon(
            scratch=folder / "scratch", socket_dir=sockets, log_path=sockets / "daemon.log"
        )
        cleanup.callback(daemon.close)
        daemon.wait_until_ready()
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
