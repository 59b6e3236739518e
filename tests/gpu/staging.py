"""``staging``: rates of saves and loads against plain copies to and from torch's pinned memory.

Both are timed by events of the current stream, which waits for each copy of ``save_tensor`` and of
``load_tensor``; over CUDA IPC it waits for the ring alone, so there the clock runs until all of it
is in the arena. The arena has room for all, so the disk has no part in it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

import disco_client
from disco_client import connection
from tests.gpu.bench import (
    Bench,
    Row,
    at_least,
    guarded,
    ipc_use,
    left_out,
    missing_transports,
    name_of,
    ratio,
    transports,
)
from tests.gpu.timing import seconds_of

SIZES = (8 << 20, 32 << 20, 128 << 20, 512 << 20)
QUICK_SIZES = (1 << 20,)
TOTAL = 1 << 30
"""Moved each way in a round, in tensors of one size."""
QUICK_TOTAL = 4 << 20
ROUNDS = 5

GOAL_RATE = 0.9

Timer = Callable[[Callable[[], object]], float]


def run(bench: Bench) -> Iterator[Row]:
    """All sizes over each transport, then what pinning took."""
    yield from missing_transports(bench)
    total = bench.pick(TOTAL, QUICK_TOTAL)
    for transport in transports(bench):
        settings = {"keep_on_device": 0, "staging": 2 * total, "arena": 2 * total, **transport}
        with bench.attached(**settings) as daemon:
            for size in bench.pick(SIZES, QUICK_SIZES):
                what = f"{size >> 20} MiB, {name_of(transport)}"
                yield from guarded(what, Moves(bench, transport, size, total).compare(what))
            yield from guarded("pinning", pinning_cost(bench, name_of(transport)))
            yield from ipc_use(bench, name_of(transport), transport, daemon)


class Moves:
    """Tensors of one size, moved by discod and without it, in turns."""

    def __init__(self, bench: Bench, transport: dict[str, str], size: int, total: int) -> None:
        self._bench = bench
        clock: Timer = partial(seconds_of, bench)
        self._timer = event_seconds if bench.on_gpu else clock
        self._save_timer = clock if name_of(transport) == "cuda-ipc" else self._timer
        self._total = total
        self._sources = [
            torch.full((size // 4,), float(i), device=bench.device) for i in range(total // size)
        ]
        self._buffers = [torch.empty(size // 4, pin_memory=bench.on_gpu) for _ in self._sources]
        for buffer in self._buffers:
            buffer.zero_()
        # Nothing is brought back ahead: each load is a copy of its own.
        self._manager = disco_client.DiskOffloadManager(prefetch_to_gpu=False)
        self._handles: list[disco_client.BlobHandle] = []
        self._wrong = 0

    def compare(self, what: str) -> Iterator[Row]:
        """A row for each direction."""
        self._out(), self._back()  # pins the arena, and starts the allocators
        rates: dict[str, list[float]] = {
            name: [] for name in ("out", "plain out", "in", "plain in")
        }
        for _ in range(self._bench.pick(ROUNDS, 2)):
            rates["plain out"].append(self._plainly(self._buffers, self._sources))
            rates["out"].append(self._out())
            rates["plain in"].append(self._plainly(self._sources, self._buffers))
            rates["in"].append(self._back())
        for direction in ("out", "in"):
            own, other = median(rates[direction]), median(rates[f"plain {direction}"])
            note = f": {own / 1e9:.2f} GB/s, plain {other / 1e9:.2f}"
            name = f"rate {direction} over a pinned copy's, {what}"
            if self._bench.on_gpu:
                yield at_least(name, ratio(own, other), GOAL_RATE, note, rates)
            else:
                yield Row(name, f"{ratio(own, other):.3f}{note}", data=rates)
        yield Row(f"loaded as saved, {what}", f"{self._wrong} wrong", "0", self._wrong == 0)

    def _out(self) -> float:
        def save() -> None:
            self._handles += [self._manager.save_tensor(source) for source in self._sources]
            if self._save_timer is not self._timer:
                self._wait()

        seconds = self._save_timer(save)
        self._wait()
        return self._total / seconds

    def _wait(self) -> None:
        for handle in self._handles:
            self._manager.wait_for_save(handle)

    def _back(self) -> float:
        loaded: list[Tensor] = []

        def load() -> None:
            loaded.extend(self._manager.load_tensor(handle) for handle in reversed(self._handles))

        seconds = self._timer(load)
        for source, tensor in zip(reversed(self._sources), loaded, strict=True):
            self._wrong += not torch.equal(source, tensor)
        loaded.clear()
        for handle in self._handles:
            self._manager.cleanup_tensor(handle)
        self._handles.clear()
        return self._total / seconds

    def _plainly(self, targets: list[Tensor], sources: list[Tensor]) -> float:
        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        return self._total / self._timer(copy)


def event_seconds(work: Callable[[], object]) -> float:
    """Time between events of the current stream, before and after ``work``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def pinning_cost(bench: Bench, where: str) -> Iterator[Row]:
    """What pinning the arena took, as far as it was used."""
    pinning = arena_pinning(bench)
    if pinning is None or not pinning.pinned_bytes:
        yield left_out(f"pinning, {where}", "nothing is pinned here")
        return
    seconds = pinning._seconds
    value = f"{seconds / (pinning.pinned_bytes / 1e9):.3f} s/GB"
    data = {"seconds": seconds, "bytes": pinning.pinned_bytes}
    yield Row(f"pinning, {where}", value, data=data)


def arena_pinning(bench: Bench):  # type: ignore[no-untyped-def]  # of the client's inside
    """The client's ``Pinning``, or None where it has none."""
    device = connection.current().store._devices.of(bench.device)
    return getattr(getattr(device, "_fallback", device), "_pinning", None)
