"""What the daemon runs on, in one thread: its loop, chores and I/O threads go on step by step."""

import heapq
import itertools
import random
import select
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from discod.admission import Admitted
from discod.engine import Engine, Job
from discod.loop import Timer
from discod.recorder import Recorder
from discod.schedule import Schedule
from discod.transfer import Io, ReadBlob, WriteBlob

Step = Callable[[], None]

GARBAGE = 0xA5


class Clock:
    """In place of the module ``time``: it goes on when the world says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Of a daemon that waits for a lock, which nobody lets go of meanwhile."""
        self.now += seconds


class SteppedLoop:
    """In place of :class:`discod.loop.Loop`.

    Args:
        clock: Of its timers.
    """

    def __init__(self, clock: Clock) -> None:
        self.stopped = False
        self.readers: dict[int, Step] = {}
        self.posted: deque[Step] = deque()
        self._batch: list[tuple[int, Step]] = []
        self._clock = clock
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def add_reader(self, fd: int, callback: Step) -> None:
        """As the real one's."""
        assert fd not in self.readers
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        """As the real one's."""
        del self.readers[fd]

    def call_later(self, seconds: float, callback: Step) -> Timer:
        """As the real one's."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (self._clock.now + seconds, next(self._order), timer))
        return timer

    def post(self, *callbacks: Step) -> None:
        """As the real one's."""
        self.posted.extend(callbacks)

    def stop(self) -> None:
        """As the real one's."""
        self.stopped = True

    def steps(self) -> list[Step]:
        """What the real loop could do next: it serves all that was ready at once, in any order."""
        if not self._batch:
            poller = select.poll()
            for fd in self.readers:
                poller.register(fd, select.POLLIN)
            self._batch = [(fd, self.readers[fd]) for fd, _ in poller.poll(0)]
        found = [lambda i=i: self._serve(i) for i in range(len(self._batch))]
        if self.posted:
            found.append(lambda: self.posted.popleft()())
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if self._timers and self._timers[0][0] <= self._clock.now:
            found.append(self._tick)
        return found

    def _serve(self, index: int) -> None:
        fd, callback = self._batch.pop(index)
        if self.readers.get(fd) is callback:
            callback()

    def _tick(self) -> None:
        timer = heapq.heappop(self._timers)[2]
        callback, timer.callback = timer.callback, None
        if callback is not None:
            callback()


class SteppedChores:
    """In place of :class:`discod.chores.Chores`."""

    def __init__(self, post: Callable[[Step], None]) -> None:
        self._post = post
        self.queue: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.undelivered: list[Any] = []

    def submit(self, function: Callable[[], Any], outcome: Callable[[Any], None]) -> None:
        """As the real one's."""
        self.queue.append((function, outcome))

    def steps(self) -> list[Step]:
        """The one thread goes on."""
        return [self._run] if self.queue else []

    def end_of_process(self) -> None:
        """Nothing more is done; the kernel closes what had been opened for it."""
        for function, _ in self.queue:
            owner = getattr(function, "__self__", None)
            if isinstance(owner, Admitted):
                owner.free()
        for result in self.undelivered:
            if isinstance(result, Admitted):
                result.free()
        self.queue.clear()

    def _run(self) -> None:
        function, outcome = self.queue.popleft()
        try:
            result = function()
        except Exception as error:  # noqa: BLE001  as the real one does
            result = error
        self.undelivered.append(result)

        def deliver() -> None:
            self.undelivered.remove(result)
            outcome(result)

        self._post(deliver)


class SteppedEngine(Engine):
    """The real engine without its threads: a piece begins in one step and ends in another.

    What a read reads into is spoilt when it begins, and what a write writes must not change.
    """

    def __init__(
        self,
        threads: int,
        chunk_bytes: int,
        post: Callable[[Step], None],
        io: Io | None = None,
        name: str = "",
        recorder: Recorder | None = None,
    ) -> None:
        self._schedule = Schedule(threads, chunk_bytes)
        self._post = post
        self._io = io or Io()
        self._lock = threading.Lock()
        self._idle = []
        self._stopping = self._holding = False
        self._to_retry = set()
        self._held = []
        self._held_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._threads = []
        self._recorder = recorder or Recorder(1)
        self._most = threads
        self.running: list[tuple[list[Job], int, int, list[bytes]]] = []
        self.violations: list[str] = []

    def steps(self) -> list[Step]:
        """A thread begins a piece or ends one."""
        found: list[Step] = []
        if len(self.running) < self._most and self._schedule.ready:
            found.append(self._begin)
        found += [lambda i=i: self.end(i) for i in range(len(self.running))]
        return found

    def _begin(self) -> None:
        piece = self._schedule.pop()
        assert piece is not None
        job, start, length = piece
        jobs = [job, *(self._schedule.join(job) if length == job.size_bytes else [])]
        before = []
        for one in jobs:
            data = _data(one)[start : start + length] if one is job else _data(one)
            if isinstance(one.work, ReadBlob):
                data[:] = bytes([GARBAGE]) * len(data)
            before.append(bytes(data))
        self.running.append((jobs, start, length, before))

    def end(self, index: int) -> None:
        """A piece is done, and what comes of it."""
        jobs, start, length, before = self.running.pop(index)
        self._check(jobs, start, before)
        if len(jobs) > 1:
            self._run_joined(jobs, 0)
        else:
            self._run(jobs[0], start, length, 0)

    def end_of_process(self, chance: random.Random) -> None:
        """The process dies: each piece in flight is done whole, in part, or not at all."""
        for jobs, start, length, before in self.running:
            self._check(jobs, start, before)
            for job in jobs:
                size = length if job is jobs[0] else job.size_bytes
                part = chance.choice((0, size // 2 // 4096 * 4096, size))
                if part:
                    job.work.run(self._io, start if job is jobs[0] else 0, part)
        self.running = []

    def _check(self, jobs: list[Job], start: int, before: list[bytes]) -> None:
        for job, was in zip(jobs, before, strict=True):
            at = start if job is jobs[0] else 0
            if bytes(_data(job)[at : at + len(was)]) != was:
                self.violations.append(f"{type(job.work).__name__}: its slot changed while it ran")


def _data(job: Job) -> memoryview:
    assert isinstance(job.work, ReadBlob | WriteBlob)
    return job.work.data


def module(clock: Clock) -> SimpleNamespace:
    """What modules see as ``time``."""
    return SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
