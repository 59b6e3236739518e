"""A tenant under any requests: one answer each, and nothing out of bounds gets to engine or GPU."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from discod import tenant as tenant_module
from discod.checksum import Mode
from discod.engine import Cancelled, Engine, Job
from discod.gpu_messages import AddRing, Copy, RingWork
from discod.gpu_seat import Outcome, Seat
from discod.gpus import Gpus
from discod.health import Health
from discod.mapping import Mapping
from discod.scratch_file import ScratchFile
from discod.tenant import MAX_FILE_BYTES, File, Tenant, Who
from discod.wire import PAGE_BYTES
from discod.wire.messages import (
    Cancel,
    CloseRing,
    CopyIn,
    CopyOut,
    OpenRing,
    Ping,
    Promote,
    Read,
    Reply,
    Report,
    Request,
    Trim,
    Write,
)
from tests.fuzz.source import Source

EPOCH = 7
ARENA_BYTES = 8 * PAGE_BYTES
FILES = 2
MOST = 6
"""In place of ``MAX_UNANSWERED``, so that a short input gets there."""

NUMBERS = (
    *(0, 1, -1, PAGE_BYTES - 1, PAGE_BYTES, 2 * PAGE_BYTES, 7 * PAGE_BYTES),
    *(ARENA_BYTES, ARENA_BYTES + 1, ARENA_BYTES + PAGE_BYTES),
    *((1 << 63) - 1, (1 << 63) - PAGE_BYTES, (1 << 62), (1 << 62) - PAGE_BYTES, 1 << 32),
)


class Arena:
    """In place of the mapping: a view is its range."""

    fd = -1
    size_bytes = ARENA_BYTES

    def view(self, start: int, length: int) -> Any:
        check_inside(start, length, ARENA_BYTES)
        return memoryview(bytes(ARENA_BYTES))[start : start + length]


class Scratch:
    """In place of a scratch file."""

    directory = "/scratch"
    allocated_bytes = 0
    health = Health()

    def keep(self) -> int:
        return 0


class RecordingEngine:
    """In place of the I/O threads: jobs end when the input says so."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        work: Any = job.work
        check_inside(work.offset, job.size_bytes, MAX_FILE_BYTES)
        assert job.size_bytes == len(work.data)
        assert not (work.offset % PAGE_BYTES)
        assert not (job.size_bytes % PAGE_BYTES)
        self.jobs.append(job)

    def promote(self, job: Job) -> None:
        assert job in self.jobs

    def cancel(self, job: Job) -> None:
        self.end(job, Cancelled())

    def drop_owner(self, owner: object) -> None:
        for job in list(self.jobs):
            self.end(job, Cancelled())

    def end(self, job: Job, error: BaseException | None) -> None:
        self.jobs.remove(job)
        job.error = error
        job.done(job)


class RecordingGpu:
    """In place of a GPU: checks what its process would be told."""

    def __init__(self) -> None:
        self.works: list[tuple[RingWork, Outcome]] = []
        self.ring_bytes: dict[tuple[int, int], int] = {}

    def ticket(self) -> int:
        return 1

    def submit(self, seat: Seat, message: RingWork, outcome: Outcome) -> None:
        if isinstance(message, AddRing):
            assert message.ring_bytes > 0
            self.ring_bytes[message.client, message.ring] = message.ring_bytes
        elif isinstance(message, Copy):
            check_inside(message.slot, message.length, ARENA_BYTES)
            ring_bytes = self.ring_bytes[message.client, message.ring]
            check_inside(message.offset, message.length, ring_bytes)
        self.works.append((message, outcome))

    def remove(self, seat: Seat, left: Callable[[], None]) -> None:
        gone = [work for work in self.works if work[0].client == seat.number]
        self.works = [work for work in self.works if work[0].client != seat.number]
        for _, outcome in gone:
            outcome("the client leaves")
        left()


class RecordingGpus:
    """In place of all GPUs."""

    def __init__(self) -> None:
        self.gpu = RecordingGpu()
        self.seats = 0

    def seat(self, uuid: bytes, arena_fd: int, arena_bytes: int) -> Seat:
        self.seats += 1
        return Seat(self.gpu, self.seats, arena_fd, arena_bytes)


@contextmanager
def few_unanswered_and_no_log() -> Iterator[None]:
    """What is in the way of a million executions."""
    most, tenant_module.MAX_UNANSWERED = tenant_module.MAX_UNANSWERED, MOST
    logging.disable()
    try:
        yield
    finally:
        tenant_module.MAX_UNANSWERED = most
        logging.disable(logging.NOTSET)


def check_inside(start: int, length: int, size_bytes: int) -> None:
    """Fail unless the range is not empty and inside, by arithmetic that cannot overflow."""
    assert 0 <= start < start + length <= size_bytes, (start, length, size_bytes)


def requests(data: bytes) -> None:
    """Handle requests, end jobs and copies, and close, as ``data`` says."""
    source = Source(data)
    engine, gpus = RecordingEngine(), RecordingGpus()
    answered: Counter[int] = Counter()
    asked: Counter[int] = Counter()

    def answer(reply: Reply) -> None:
        assert not tenant.closing, "an answer to a client that is gone"
        answered[reply.seq] += 1

    files = [
        File(cast(ScratchFile, Scratch()), cast(Engine, engine), number) for number in range(FILES)
    ]
    tenant = Tenant(
        Who(1, 1, 0),
        EPOCH,
        cast(Mapping, Arena()),
        files,
        Mode.OFF,
        cast(Gpus, gpus),
        answer,
        lambda file: None,
    )
    with few_unanswered_and_no_log():
        while not source.ended:
            match source.number() % 8:
                case 0 if engine.jobs:
                    error = source.choose((None, OSError(5, "EIO"), OSError(28, "full")))
                    engine.end(source.choose(engine.jobs), error)
                case 1 if gpus.gpu.works:
                    work = source.choose(gpus.gpu.works)
                    gpus.gpu.works.remove(work)
                    work[1](source.choose(("", "no such GPU")))
                case _:
                    request = draw(source)
                    asked[request.seq] += 1
                    tenant.handle(request)
            assert tenant.in_flight <= MOST
            assert sum(asked.values()) == sum(answered.values()) + tenant.in_flight
        ended = source.number() % 2
        if ended:
            for job in list(engine.jobs):
                engine.end(job, None)
            while gpus.gpu.works:
                gpus.gpu.works.pop(0)[1]("")
            assert asked == answered
        closed: list[bool] = []
        tenant.close(lambda: closed.append(True))
        assert closed == [True]


def draw(source: Source) -> Request:
    """A request with a mixture of sensible and wild fields."""

    def number(sensible: int) -> int:
        return sensible if source.number() % 4 else source.choose(NUMBERS)

    seq, epoch = source.number() % 8, number(EPOCH)
    file = number(source.number() % FILES)
    offset = number(source.number() % 8 * PAGE_BYTES)
    slot = number(source.number() % 8 * PAGE_BYTES)
    length = number(source.number() % 8 * PAGE_BYTES)
    ring = number(source.number() % 2)
    match source.number() % 11:
        case 0:
            return Write(seq, epoch, file, offset, slot, length)
        case 1:
            token = b"" if source.number() % 4 else source.block()
            return Read(seq, epoch, file, offset, slot, length, token, slot == 0)
        case 2:
            return Promote(seq, epoch, source.number() % 8)
        case 3:
            return Cancel(seq, epoch, source.number() % 8)
        case 4:
            return Trim(seq, epoch, file, offset)
        case 5:
            return Ping(seq, epoch)
        case 6:
            uuid = bytes([source.number() % 2]) * (16 if source.number() % 8 else 15)
            handle = bytes(64 if source.number() % 8 else 63)
            return OpenRing(seq, epoch, ring, uuid, handle, length, (handle,) * (slot % 3))
        case 7:
            return CloseRing(seq, epoch, ring)
        case 8:
            numbers = tuple(number(source.number() % 3) for _ in range(10))
            spans = tuple(number(source.number() % 3) for _ in range(source.number() % 8))
            return Report(seq, epoch, *numbers, spans)
        case 9:
            return CopyOut(seq, epoch, ring, offset, slot, length - source.number() % 2, offset % 5)
        case _:
            return CopyIn(seq, epoch, ring, offset, slot, length - source.number() % 2)
