"""``memory``: how much less of the GPU's memory a step takes than with plain checkpointing."""

import gc
from collections.abc import Iterator

import torch

import disco_client
from discod.wire.sizes import format_size
from tests.gpu.bench import (
    Bench,
    Row,
    at_least,
    guarded,
    left_out,
    missing_transports,
    name_of,
    transports,
)
from tests.gpu.llama import Apply, Shape, Task, plain

FULL = Shape(layers=32, width=2048, batch=1, length=16384)
"""Inputs of 64 MiB each in bfloat16, 2 GiB in all."""
QUICK = Shape(layers=4, width=128, batch=1, length=512, head_width=64)

GOAL_FREED = 0.98

STEPS = 3
"""The first learns the order of loads; a peak counts from the second on."""


def run(bench: Bench) -> Iterator[Row]:
    """Peak bytes with plain checkpointing and with discod, of the same step."""
    yield from missing_transports(bench)
    shape = bench.pick(FULL, QUICK)
    task = Task.make(shape, bench.device, bench.dtype)
    before = peak_bytes(bench, task, plain)
    for transport in transports(bench):
        where = name_of(transport)
        yield from guarded(where, _compare(bench, shape, task, before, transport))
        yield from guarded(f"defaults, {where}", _by_default(bench, shape, task, before, transport))


def _compare(
    bench: Bench, shape: Shape, task: Task, before: int, transport: dict[str, str]
) -> Iterator[Row]:
    blob_bytes = shape.hidden_bytes(bench.dtype)
    input_bytes = shape.layers * blob_bytes
    where = name_of(transport)
    for keep, staging_blobs in ((0, 1), (1, 4)):
        staging_bytes = staging_blobs * blob_bytes
        with bench.attached(
            arena=bench.pick(2, 1) * input_bytes,
            min_bytes=blob_bytes,
            keep_on_device=keep,
            staging=staging_bytes,
            **transport,
        ):
            after = peak_bytes(bench, task, disco_client.checkpoint)
            saved_bytes = disco_client.stats().last_cycle.saved_bytes
        what = f"{where}, keep_on_device={keep}, staging={format_size(staging_bytes)}"
        yield Row(
            f"bytes saved, {what}",
            format_size(saved_bytes),
            format_size(input_bytes),
            saved_bytes == input_bytes,
        )
        if not bench.on_gpu:
            yield left_out(f"freed over predicted, {what}", "needs a GPU")
            continue
        # What must stay: the input that is in use, what was kept, what is on its way out and in.
        predicted = saved_bytes - (1 + keep) * blob_bytes - 2 * staging_bytes
        note = f": {format_size(before)} to {format_size(after)}"
        figures = {"before": before, "after": after, "saved": saved_bytes, "predicted": predicted}
        freed = (before - after) / predicted
        yield at_least(f"freed over predicted, {what}", freed, GOAL_FREED, note, figures)


def _by_default(
    bench: Bench, shape: Shape, task: Task, before: int, transport: dict[str, str]
) -> Iterator[Row]:
    """What the defaults free, whose ``staging`` may hold as much as all of the inputs."""
    what = f"freed, {name_of(transport)}, default settings"
    if not bench.on_gpu:
        yield left_out(what, "needs a GPU")
        return
    blob_bytes = shape.hidden_bytes(bench.dtype)
    arena_bytes = 2 * shape.layers * blob_bytes
    with bench.attached(arena=arena_bytes, **transport):
        after = peak_bytes(bench, task, disco_client.checkpoint)
    value = f"{format_size(before)} to {format_size(after)}"
    yield Row(what, value, data={"before": before, "after": after})


def peak_bytes(bench: Bench, task: Task, apply: Apply) -> int:
    """The most that torch had allocated at a time, over some steps but the first; 0 on the CPU."""
    task.step(apply)
    gc.collect()
    if bench.on_gpu:
        bench.synchronize()
        torch.cuda.reset_peak_memory_stats(bench.device)
    for _ in range(STEPS - 1):
        task.step(apply)
    bench.synchronize()
    return torch.cuda.max_memory_allocated(bench.device) if bench.on_gpu else 0
