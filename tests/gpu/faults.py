"""``faults``: SIGKILL of the daemon, of its GPU process and of the trainer, in the middle of a job.

The trainers are processes of their own (``tests.gpu.trainer``), stopped after their first forward.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from discod.wire.sizes import format_size
from tests.gpu.bench import (
    Bench,
    Row,
    guarded,
    left_out,
    leftovers,
    missing_transports,
    name_of,
    transports,
)
from tests.gpu.trainer import train
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.jobs import Rank

PROGRAM = "tests.gpu.trainer"
FULL = {"layers": 24, "width": 256, "length": 512, "steps": 10}
"""Inputs of 1 MiB, three times the arena in all."""
QUICK = {"layers": 12, "width": 128, "length": 256, "steps": 2}
CONNECT = {"arena": "8MiB", "min_bytes": "256KiB"}
QUICK_CONNECT = {"arena": "2MiB", "min_bytes": "128KiB"}
BALLAST_BYTES = 1 << 30
"""What a trainer that is to be killed holds on the GPU, beside its training."""
TOLERANCE_BYTES = 64 << 20
"""Of the GPU's memory, which other processes use too."""
REPORT_SECONDS = 60.0
FREE_SECONDS = 10.0


@dataclass(slots=True)
class Job:
    """A trainer and its daemons, of which the last one runs."""

    bench: Bench
    rank: Rank
    daemons: list[Daemon] = field(default_factory=list)

    @classmethod
    def start(cls, bench: Bench, settings: dict[str, Any], transport: dict[str, str]) -> "Job":
        """The trainer is not ready yet."""
        daemon = bench.start_daemon()
        connect = bench.pick(CONNECT, QUICK_CONNECT) | {"socket_dir": str(daemon.socket_dir)}
        rank = Rank(
            settings | {"form": "checkpoint", "connect": connect | transport},
            PROGRAM,
            fresh=bench.on_gpu,
        )
        return cls(bench, rank, [daemon])

    @property
    def daemon(self) -> Daemon:
        """The one that runs."""
        return self.daemons[-1]

    def restart_daemon(self) -> None:
        """SIGKILL, and another in its place."""
        self.daemon.kill()
        self.daemons.append(self.bench.restart_daemon(self.daemon.scratch, self.daemon.socket_dir))

    def close(self) -> None:
        """End both."""
        self.rank.kill()
        self.daemon.close()


def run(bench: Bench) -> Iterator[Row]:
    """Each fault over each transport."""
    torch.set_num_threads(1)
    yield from missing_transports(bench)
    settings = bench.pick(FULL, QUICK) | {"device": str(bench.device)}
    expected = train(settings | {"form": "plain"})
    for transport in transports(bench):
        where = name_of(transport)
        yield from guarded(where, _all_faults(bench, where, settings, transport, expected))


def _all_faults(
    bench: Bench,
    where: str,
    settings: dict[str, Any],
    transport: dict[str, str],
    expected: list[str],
) -> Iterator[Row]:
    """All trainers start at a time, which takes longest; then one fault after the other."""
    survived: dict[str, Callable[[Job], None]] = {
        "daemon killed after a forward": _kill_while_stopped,
        "daemon killed in a backward": _kill_while_running,
    }
    if where == "cuda-ipc":
        survived["GPU process killed"] = _kill_helper
    ballast = {"ballast": BALLAST_BYTES if bench.on_gpu else 0}
    with ExitStack() as cleanup:
        jobs = {name: Job.start(bench, settings, transport) for name in survived}
        victim = Job.start(bench, settings | ballast, transport)
        for job in (*jobs.values(), victim):
            cleanup.callback(job.close)
        for name, job in jobs.items():
            rows = _outcome(f"{name}, {where}", job, survived[name], expected)
            yield from guarded(f"{name}, {where}", rows)
        yield from guarded(f"trainer killed, {where}", _trainer_killed(bench, where, victim))


def _outcome(
    what: str, job: Job, fault: Callable[[Job], None], expected: list[str]
) -> Iterator[Row]:
    job.rank.wait_ready()
    fault(job)
    report = job.rank.report(REPORT_SECONDS)
    same = report["prints"] == expected
    written = format_size(report["written_bytes"])
    value = f"{len(expected)} steps {'equal' if same else 'DIFFER'}, {written} written"
    ok = same and report["written_bytes"] > 0 and report["live"] == 0
    yield Row(what, value, "bit-equal", ok)
    yield from _nothing_left(what, job)


def _nothing_left(what: str, job: Job) -> Iterator[Row]:
    def gone() -> bool:
        status = job.daemon.status()
        return not status["clients"] and status["ram_used_bytes"] == status["disk_used_bytes"] == 0

    eventually(gone, FREE_SECONDS, "the end of the trainer at the daemon")
    left = leftovers(job.daemon)
    yield Row(f"left after it: {what}", ", ".join(left) or "nothing", "nothing", not left)


def _kill_while_stopped(job: Job) -> None:
    job.restart_daemon()
    job.rank.go_on()


def _kill_while_running(job: Job) -> None:
    job.rank.go_on()
    job.restart_daemon()


def _kill_helper(job: Job) -> None:
    pid = helper_pid(job.daemon.status())
    if pid is None:
        raise RuntimeError(f"the daemon's status names no GPU process: {job.daemon.status()}")
    job.rank.go_on()
    os.kill(pid, signal.SIGKILL)


def helper_pid(status: dict[str, Any]) -> int | None:
    """The pid of the daemon's first GPU process that runs, as its status has it."""
    return next((int(gpu["pid"]) for gpu in status["gpus"] if gpu["pid"]), None)


def _trainer_killed(bench: Bench, where: str, job: Job) -> Iterator[Row]:
    what = f"trainer killed, {where}"
    job.rank.wait_ready()
    held = free_bytes(bench)
    job.rank.kill()
    yield from guarded(what, _nothing_left(what, job))
    if not bench.on_gpu:
        yield left_out(f"GPU memory freed: {what}", "needs a GPU")
        return
    wanted = held + BALLAST_BYTES - TOLERANCE_BYTES
    eventually(lambda: free_bytes(bench) >= wanted, FREE_SECONDS, "the GPU's memory being free")
    freed = format_size(free_bytes(bench) - held)
    yield Row(f"GPU memory freed: {what}", freed, f">= {format_size(BALLAST_BYTES)}", True)


def free_bytes(bench: Bench) -> int:
    """Of the GPU's memory, whoever uses it; 0 on the CPU."""
    return torch.cuda.mem_get_info(bench.device)[0] if bench.on_gpu else 0
