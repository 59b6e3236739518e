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
    ipc_use,
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


@dataclass(frozen=True, slots=True)
class Course:
    """What a race is run on.

    Attributes:
        arena: Its size.
        numbers: In a tensor of float32.
        window: Tensors that are alive at a time, about.
        rounds: Tensors to save in all, if there is time.
        least: Rounds without which a race shows nothing.
    """

    arena: str
    numbers: int
    window: int
    rounds: int
    least: int


FULL = (
    # Copies of 16 MiB take as long as the calls that start them, so many are under way at a time.
    Course("1GiB", 1 << 22, window=32, rounds=2000, least=200),
    # Twice the arena is alive, so half of it goes over the disk, which sets the pace.
    Course("64MiB", 1 << 20, window=32, rounds=1000, least=50),
)
QUICK = (
    Course("16MiB", 1 << 14, window=64, rounds=100, least=50),
    Course("2MiB", 1 << 14, window=64, rounds=100, least=50),
)
RACES = 7
TIME_SHARE = 0.6
"""Of the part's time, for all races together."""
SLEEP_CYCLES = 2_000_000
"""About a millisecond: the GPU falls behind the program, which is when races show."""
SLEEP_EVERY = 16


@dataclass(slots=True)
class Found:
    """What a run found: rounds made, wrong numbers, loads refused."""

    rounds: int = 0
    wrong: int = 0
    refused: int = 0


def run(bench: Bench) -> Iterator[Row]:
    """Each race in an arena that has room for all, then in one that needs the disk."""
    yield from missing_transports(bench)
    for transport in transports(bench):
        for course in bench.pick(FULL, QUICK):
            where = f"{name_of(transport)}, arena {course.arena}"
            yield from guarded(where, _on_course(bench, where, course, transport))


def _on_course(
    bench: Bench, where: str, course: Course, transport: dict[str, str]
) -> Iterator[Row]:
    with bench.attached(arena=course.arena, **transport) as daemon:
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
            what = f"{name}, {where}"
            yield from guarded(what, _race(bench, course, what, way, own, threads))
        if bench.on_gpu:
            what = f"saved on one stream, loaded on another, {where}"
            yield from guarded(what, _crossing(bench, course, what, hooked))
        stats = disco_client.stats()
        live, saved = stats.live_blobs, stats.saved_blobs
        value = f"{live} live blobs of {saved}"
        yield Row(f"nothing stays, {where}", value, "0", live == 0 and saved > 0)
        yield from ipc_use(bench, where, transport, daemon)


def through_hooks() -> Way:
    """As autograd saves: the source may be freed, but is not to be changed before it landed."""
    hooks = connection.current().packer.hooks(Group(), 1)
    return Way(hooks.pack_hook, hooks.unpack_hook)


def through_manager() -> Way:
    """As a program saves by hand: the source may be changed at once."""
    manager = disco_client.DiskOffloadManager()
    return Way(manager.save_tensor, manager.load_tensor)


def _race(
    bench: Bench, course: Course, what: str, way: Way, own_stream: bool, threads: int
) -> Iterator[Row]:
    def work(seed: int) -> Found:
        with _stream(bench, own_stream):
            return Racer(bench, course, way, seed).race()

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, range(threads)))
    yield _judge(course, what, found)


def _judge(course: Course, what: str, found: list[Found]) -> Row:
    rounds, wrong, refused = (
        sum(getattr(one, name) for one in found) for name in ("rounds", "wrong", "refused")
    )
    value = f"{wrong} wrong numbers in {rounds} tensors"
    if refused:
        value += f", {refused} refused"
    goal = f"0 in >= {course.least}"
    return Row(what, value, goal, wrong == 0 and rounds >= course.least)


def _stream(bench: Bench, own: bool) -> AbstractContextManager[Any]:
    if not (own and bench.on_gpu):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(bench.device))


class Racer:
    """One thread's saves and loads, on its current stream, in a random order."""

    def __init__(self, bench: Bench, course: Course, way: Way, seed: int) -> None:
        self._bench = bench
        self._course = course
        self._way = way
        self._random = random.Random(seed)
        self._live: deque[tuple[int, Any]] = deque()
        self._base = torch.arange(course.numbers, device=bench.device) % VALUES * 1.0
        self.wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
        self.found = Found()

    def race(self) -> Found:
        """Save and load until there were enough rounds, or time is over."""
        deadline = time.monotonic() + race_seconds(self._bench)
        while self.found.rounds < self._course.rounds and time.monotonic() < deadline:
            self._live.append(self.save())
            if len(self._live) > self._course.window:
                self._live.rotate(self._random.randrange(len(self._live)))
                self.check(*self._live.pop())
        while self._live:
            self.check(*self._live.pop())
        self.found.wrong = int(self.wrong.item())
        return self.found

    def save(self) -> tuple[int, Any]:
        """Save a tensor and free it, or change it: its number, and what loads it."""
        number = self.found.rounds
        self.found.rounds += 1
        if self._bench.on_gpu and number % SLEEP_EVERY == 0:
            torch.cuda._sleep(SLEEP_CYCLES)
        tensor = self._base + float(number)
        saved = self._way.save(tensor)
        if self._way.changes:
            tensor.fill_(float("nan"))
        del tensor
        self.litter()
        return number, saved

    def check(self, number: int, saved: Any) -> None:
        """Load it, count what is wrong, and free it."""
        try:
            loaded = self._way.load(saved)
        except disco_client.BlobModified:
            if not self._way.may_refuse:
                raise
            self.found.refused += 1
            return
        self.wrong += (loaded != self._base + float(number)).sum()
        del loaded, saved
        self.litter()

    def litter(self) -> None:
        """Take memory of the same size, which is what was freed last, and fill it with NaN."""
        torch.full((self._course.numbers,), float("nan"), device=self._bench.device)


def race_seconds(bench: Bench) -> float:
    """What one race may take; the tiny form ends after its rounds alone."""
    if bench.quick:
        return bench.seconds
    races = len(transports(bench)) * len(bench.pick(FULL, QUICK)) * RACES
    return TIME_SHARE * bench.seconds / races


def _crossing(bench: Bench, course: Course, what: str, way: Way) -> Iterator[Row]:
    """Each stream waits for the other, as a program has to see to it."""
    one, other = torch.cuda.Stream(bench.device), torch.cuda.Stream(bench.device)
    with torch.cuda.stream(one):
        racer = Racer(bench, course, way, seed=0)
    deadline = time.monotonic() + race_seconds(bench)
    while racer.found.rounds < course.rounds and time.monotonic() < deadline:
        with torch.cuda.stream(one):
            number, saved = racer.save()
        other.wait_stream(one)
        with torch.cuda.stream(other):
            racer.check(number, saved)
            del saved
            racer.litter()
        one.wait_stream(other)
    torch.cuda.synchronize(bench.device)
    racer.found.wrong = int(racer.wrong.item())
    yield _judge(course, what, [racer.found])
