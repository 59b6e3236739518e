"""``step``: how long a step takes over plain checkpointing, and how much copying it hides."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import disco_client
from discod.wire import align_up
from discod.wire.sizes import format_size
from tests.gpu import overlap
from tests.gpu.bench import (
    Bench,
    Row,
    at_most,
    guarded,
    ipc_use,
    left_out,
    missing_transports,
    name_of,
    ratio,
    transports,
)
from tests.gpu.llama import Shape, Task, plain
from tests.gpu.timing import disk_rates, in_turns

GOAL_STEP = 1.02

ROOM = 1.25
"""Of what is saved: an arena of so much writes nothing, its reserve for reading included."""
DISK_SHARE = 0.25
"""Of the step's time, that writing and reading each may take where the disk is to have room."""
WARM_UP_STEPS = 3
"""The first pins the arena, the second knows the order, the third has all extents."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model, and how much of it may go to disk.

    Attributes:
        goal: Most step time over plain's; None: nothing is asked.
        disk_share: Of what is saved; None: as much as the disk has room for in the step's time.
    """

    name: str
    full: Shape
    rounds: int
    goal: float | None
    disk_share: float | None


LOADS = (
    Load("compute-heavy", Shape(8, 4096, 1, 16384), 6, GOAL_STEP, None),
    Load("I/O-heavy", Shape(16, 1024, 32, 1024), 4, None, 0.5),
)
QUICK = Shape(layers=4, width=128, batch=1, length=256, head_width=64)


def run(bench: Bench) -> Iterator[Row]:
    """Both loads, over each transport."""
    yield from missing_transports(bench)
    rates = disk_rates(bench.scratch, bench.pick(1 << 30, 32 << 20))
    for load in LOADS:
        shape = bench.pick(load.full, QUICK)
        task = Task.make(shape, bench.device, bench.dtype)
        blob_bytes = shape.hidden_bytes(bench.dtype)
        saved_bytes = shape.layers * blob_bytes
        task.step(plain)
        plain_seconds = min(in_turns(bench, {"plain": partial(task.step, plain)}, 2)["plain"])
        for transport in transports(bench):
            what = f"{load.name}, {name_of(transport)}"
            arena = arena_bytes(load, saved_bytes, plain_seconds, rates)
            with bench.attached(arena=arena, min_bytes=blob_bytes, **transport) as daemon:
                yield from guarded(what, _compare(bench, what, load, task))
                yield from guarded(f"overlap, {what}", _overlap(bench, what, task))
                yield from ipc_use(bench, what, transport, daemon)
        del task


def arena_bytes(
    load: Load, saved_bytes: int, plain_seconds: float, rates: tuple[float, float] | None
) -> int:
    """An arena that lets as much go to disk as the load is to have there."""
    if load.disk_share is not None:
        disk_bytes = load.disk_share * saved_bytes
    else:
        disk_bytes = DISK_SHARE * plain_seconds * min(rates) if rates else 0.0
    disk_bytes = min(disk_bytes, saved_bytes / 2)
    return align_up(int(ROOM * saved_bytes - disk_bytes))


def _compare(bench: Bench, what: str, load: Load, task: Task) -> Iterator[Row]:
    works = {
        "plain": partial(task.step, plain),
        "discod": partial(task.step, disco_client.checkpoint),
    }
    for _ in range(WARM_UP_STEPS):
        works["discod"]()
    seconds = in_turns(bench, works, bench.pick(load.rounds, 2))
    cycle = disco_client.stats().last_cycle
    middle = {name: median(values) for name, values in seconds.items()}
    note = f": {1e3 * middle['discod']:.1f} ms, plain {1e3 * middle['plain']:.1f} ms"
    found = ratio(middle["discod"], middle["plain"])
    if load.goal is None or not bench.on_gpu:
        yield Row(f"step over plain, {what}", f"{found:.3f}{note}", data=seconds)
    else:
        yield at_most(f"step over plain, {what}", found, load.goal, note, seconds)
    waits = f"waits {cycle.save_wait_seconds:.3f} s to save, {cycle.load_wait_seconds:.3f} to load"
    moved = f"{format_size(cycle.saved_bytes)} saved, {format_size(cycle.written_bytes)} written"
    yield Row(f"a step of it, {what}", f"{moved}, {cycle.device_hits} device hits; {waits}")


def _overlap(bench: Bench, what: str, task: Task) -> Iterator[Row]:
    trace = bench.out / f"step-{what.replace(', ', '-').replace('/', '')}.trace.json"
    try:
        found = overlap.measure(bench, partial(task.step, disco_client.checkpoint), trace)
    finally:
        if not bench.on_gpu:
            trace.unlink(missing_ok=True)
    if not found.copies:
        why = "the profile has no copies" if bench.on_gpu else "needs a GPU"
        yield left_out(f"copies under kernels, {what}", why)
        return
    share, pinned = found.covered / found.copies, found.pinned / found.copies
    value = f"{share:.3f} of {found.copies / 1e3:.1f} ms; {pinned:.3f} of it pinned"
    yield Row(f"copies under kernels, {what}", value, data={"share": share, "pinned": pinned})
