"""``races``: memory freed right after a save is taken and filled with NaN at once; loads compared.

The device is never waited for within a run: what differs is counted on it, and the count is read at
the end. So a copy that comes too late, or starts too early, meets other values than were saved.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import disco_client
from disco_client import connection
from disco_client.blobs import Group
from tests.gpu.bench import (
    Bench,
    Row,
    guarded,
    missing_transports,
    name_of,
    transports,
)

VALUES = 4096
"""Different numbers in a tensor; with the number of any round they are exact in float32."""


@dataclass(frozen=True, slots=True)
class Way:
    """How tensors are saved and loaded.

    Attributes:
        changes: Whether the source is overwritten in place right after its save.
        may_refuse: Whether a load may then raise ``BlobModified`` instead.
    """

    save: Callable[[Tensor], Any]
    load: Callable[[Any], Tensor]
    changes: bool = False
    may_refuse: bool = False


@dataclass(slots=True)
class Found:
    """What a run found: rounds made, wrong numbers, loads refused."""

    rounds: int = 0
    wrong: int = 0
    refused: int = 0


def run(bench: Bench) -> Iterator[Row]:
    """Each race in an arena that has room for all, then in one that needs the disk."""
    yield from missing_transports(bench)
    roomy, narrow = bench.pick(("512MiB", "64MiB"), ("16MiB", "4MiB"))
    for transport in transports(bench):
        for arena in (roomy, narrow):
            where = f"{name_of(transport)}, arena {arena}"
            yield from guarded(where, _with_arena(bench, where, arena, transport))


def _with_arena(bench: Bench, where: str, arena: str, transport: dict[str, Any]) -> Iterator[Row]:
    with bench.attached(arena=arena, **transport):
        hooked, by_hand = through_hooks(), through_manager()
        changed = Way(by_hand.save, by_hand.load, changes=True)
        risky = Way(hooked.save, hooked.load, changes=True, may_refuse=True)
        for name, way, own, threads in (
            ("freed after a save", hooked, False, 1),
            ("freed, own stream", hooked, True, 1),
            ("freed, own streams, 2 threads", hooked, True, 2),
            ("freed, 2 threads on one stream", by_hand, False, 2),
            ("changed after save_tensor", changed, True, 1),
            ("changed before it landed", risky, False, 1),
        ):
            yield from guarded(
                f"{name}, {where}", _race(bench, f"{name}, {where}", way, own, threads)
            )
        if bench.on_gpu:
            yield from guarded(f"two streams, {where}", _crossing(bench, where, hooked))
        live = disco_client.stats().live_blobs
        yield Row(f"nothing stays, {where}", f"{live} live blobs", "0", live == 0)


def through_hooks() -> Way:
    """As autograd saves: the source may be freed, but is not to be changed before it landed."""
    hooks = connection.current().packer.hooks(Group(), 1)
    return Way(hooks.pack_hook, hooks.unpack_hook)


def through_manager() -> Way:
    """As a program saves by hand: the source may be changed at once."""
    manager = disco_client.DiskOffloadManager()
    return Way(manager.save_tensor, manager.load_tensor)


def _race(bench: Bench, what: str, way: Way, own_stream: bool, threads: int) -> Iterator[Row]:
    def work(seed: int) -> Found:
        with _stream(bench, own_stream):
            return Racer(bench, way, seed).race()

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, range(threads)))
    yield _judge(bench, what, found)


def _judge(bench: Bench, what: str, found: list[Found]) -> Row:
    rounds, wrong, refused = (
        sum(getattr(one, name) for one in found) for name in ("rounds", "wrong", "refused")
    )
    least = bench.pick(500, 50)
    value = f"{wrong} wrong numbers in {rounds} tensors"
    if refused:
        value += f", {refused} refused"
    return Row(what, value, f"0 in {least} or more", wrong == 0 and rounds >= least)


def _stream(bench: Bench, own: bool) -> AbstractContextManager[Any]:
    if not (own and bench.on_gpu):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(bench.device))


class Racer:
    """One thread's saves and loads, on its current stream, in a random order."""

    def __init__(self, bench: Bench, way: Way, seed: int) -> None:
        self.numbers = bench.pick(1 << 20, 1 << 14)
        self.device = bench.device
        self.base = torch.arange(self.numbers, device=self.device) % VALUES * 1.0
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.found = Found()
        self._way = way
        self._random = random.Random(seed)
        self._window = bench.pick(32, 64)
        self._rounds = bench.pick(2000, 100)
        self._seconds = bench.pick(4.0, 4.0)
        self._live: deque[tuple[int, Any]] = deque()

    def race(self) -> Found:
        """Save and load until there were enough rounds, or time is over."""
        deadline = time.monotonic() + self._seconds
        while self.found.rounds < self._rounds and time.monotonic() < deadline:
            self.save()
            if len(self._live) > self._window:
                self._live.rotate(self._random.randrange(len(self._live)))
                self.check(*self._live.pop())
        while self._live:
            self.check(*self._live.pop())
        self.found.wrong = int(self.wrong.item())
        return self.found

    def save(self) -> None:
        """Save a tensor and free it, or change it."""
        number = self.found.rounds
        self.found.rounds += 1
        tensor = self.base + float(number)
        self._live.append((number, self._way.save(tensor)))
        if self._way.changes:
            tensor.fill_(float("nan"))
        del tensor
        self.litter()

    def check(self, number: int, saved: Any) -> None:
        """Load it, count what is wrong, and free it."""
        try:
            loaded = self._way.load(saved)
        except disco_client.BlobModified:
            if not self._way.may_refuse:
                raise
            self.found.refused += 1
            return
        self.wrong += (loaded != self.base + float(number)).sum()
        del loaded, saved
        self.litter()

    def litter(self) -> None:
        """Take memory of the same size, which is what was freed last, and fill it with NaN."""
        torch.full((self.numbers,), float("nan"), device=self.device)


def _crossing(bench: Bench, where: str, way: Way) -> Iterator[Row]:
    """Saved on one stream and loaded on another, each waiting for the other as a program must."""
    one, other = torch.cuda.Stream(bench.device), torch.cuda.Stream(bench.device)
    with torch.cuda.stream(one):
        racer = Racer(bench, way, seed=0)
    for number in range(bench.pick(500, 50)):
        with torch.cuda.stream(one):
            racer.found.rounds += 1
            tensor = racer.base + float(number)
            saved = way.save(tensor)
            del tensor
            racer.litter()
        other.wait_stream(one)
        with torch.cuda.stream(other):
            racer.check(number, saved)
            del saved
            racer.litter()
        one.wait_stream(other)
    torch.cuda.synchronize(bench.device)
    racer.found.wrong = int(racer.wrong.item())
    yield _judge(bench, f"saved on one stream, loaded on another, {where}", [racer.found])
