"""The I/O threads, with injected failures and with real files."""

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from discod.budget import Budget
from discod.checksum import Mode
from discod.engine import Cancelled, Engine, EngineFailed, Job
from discod.io import Io
from discod.recorder import Recorder, Source, unpack
from discod.schedule import Priority
from discod.scratch_file import ScratchFile
from discod.transfer import Corrupt, ReadBlob, WriteBlob
from discod.wire import PAGE_BYTES
from tests.helpers.daemon import eventually

CHUNK = 4 * PAGE_BYTES


class Bench:
    """An engine whose ended jobs are collected, and one scratch file."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.file = ScratchFile(self.fd, str(path), direct=True, quota=Budget(1 << 30))
        self.ended: list[Job] = []
        self.engines: list[Engine] = []

    def post(self, *callbacks: Callable[[], None]) -> None:
        for callback in callbacks:
            callback()

    def engine(
        self, io: Io | None = None, threads: int = 3, recorder: Recorder | None = None
    ) -> Engine:
        engine = Engine(threads, CHUNK, post=self.post, io=io, recorder=recorder)
        self.engines.append(engine)
        return engine

    def job(
        self,
        data: bytearray,
        *,
        offset: int = 0,
        owner: str = "a",
        token: bytes | None = None,
        priority: Priority | None = None,
    ) -> Job:
        """A write, or with ``token`` a read."""
        view = memoryview(data)
        if token is None:
            write = WriteBlob(self.file, offset, view, Mode.FULL)
            return Job(owner, Priority.WRITE, len(data), write, self.ended.append)
        read = ReadBlob(self.file, offset, view, token)
        return Job(owner, priority or Priority.URGENT, len(data), read, self.ended.append)

    def run(self, engine: Engine, job: Job) -> Job:
        engine.submit(job)
        self.wait(job)
        return job

    def wait(self, *jobs: Job) -> None:
        eventually(lambda: set(jobs) <= set(self.ended))
        assert len(self.ended) == len(set(self.ended)), "a job has ended twice"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """The test fails when an engine's threads cannot be stopped."""
    bench = Bench(tmp_path / "file")
    yield bench
    for engine in bench.engines:
        engine.stop()
    bench.file.close(discard=True)


class Gate:
    """Holds writes back until it is opened; counts those that run."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self.running = 0
        self.calls = 0

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.running += 1
            self.calls += 1
        assert self._open.wait(20)
        with self._lock:
            self.running -= 1
        return os.pwritev(fd, buffers, offset)

    def open(self) -> None:
        self._open.set()


def failing(error: BaseException, at: int) -> Callable[[int, Sequence[memoryview], int], int]:
    """A pwritev or preadv that fails at one offset."""

    def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == at:
            raise error
        return len(buffers[0])

    return call


def in_steps(*most: int) -> Io:
    """Transfers at most so many bytes in the first calls."""
    steps = list(most)

    def short(call: Callable[[int, Sequence[memoryview], int], int]) -> Callable[..., int]:
        def shorter(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            assert offset % PAGE_BYTES == 0
            return call(fd, [buffers[0][: steps.pop(0)]] if steps else buffers, offset)

        return shorter

    return Io(pwritev=short(os.pwritev), preadv=short(os.preadv))


def test_write_and_read(bench: Bench) -> None:
    """What is read would not be what was written."""
    engine = bench.engine()
    data = bytearray(os.urandom(5 * CHUNK + PAGE_BYTES))
    write = bench.run(engine, bench.job(data, offset=PAGE_BYTES))
    assert write.error is None
    back = bytearray(len(data))
    read = bench.run(engine, bench.job(back, offset=PAGE_BYTES, token=write.result))
    assert read.error is None
    assert back == data


def test_calls_are_recorded(bench: Bench) -> None:
    """``discod trace`` would show other calls than those that were made, or a failure as done."""

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers) > 1 or offset >= 8 * CHUNK:
            raise OSError(errno.ENOSPC, "full")
        return os.pwritev(fd, buffers, offset)

    recorder = Recorder(100)
    engine = bench.engine(Io(pwritev=pwritev), recorder=recorder)
    began_ns = time.monotonic_ns()
    write = bench.run(engine, bench.job(bytearray(2 * CHUNK)))
    bench.run(engine, bench.job(bytearray(2 * CHUNK), token=write.result))
    bench.run(engine, bench.job(bytearray(PAGE_BYTES), offset=8 * CHUNK))
    engine.hold()
    joined = [bench.job(bytearray(PAGE_BYTES), offset=i * PAGE_BYTES) for i in range(2)]
    for job in joined:
        job.source = Source(7, 2)
        engine.submit(job)
    engine.let_go()
    bench.wait(*joined)
    first, packed, end = engine.calls(0)
    records = list(unpack(packed))
    assert (first, end) == (0, len(records))
    for record in records:
        assert began_ns <= record.queued_ns <= record.began_ns <= record.ended_ns
    assert [(r.kind, r.length, r.blobs, r.outcome, r.pid) for r in records] == [
        (Priority.WRITE, CHUNK, 1, 0, 0),
        (Priority.WRITE, CHUNK, 1, 0, 0),
        (Priority.URGENT, CHUNK, 1, 0, 0),
        (Priority.URGENT, CHUNK, 1, 0, 0),
        (Priority.WRITE, PAGE_BYTES, 1, errno.ENOSPC, 0),
        (Priority.WRITE, 2 * PAGE_BYTES, 2, errno.ENOSPC, 7),
        (Priority.WRITE, PAGE_BYTES, 1, 0, 7),
        (Priority.WRITE, PAGE_BYTES, 1, 0, 7),
    ]


def test_corrupt_data_is_noticed(bench: Bench) -> None:
    """A flipped bit on the device would become a wrong gradient."""
    engine = bench.engine()
    write = bench.run(engine, bench.job(bytearray(2 * CHUNK)))
    os.pwrite(bench.fd, b"\x01", CHUNK + 77)
    read = bench.run(engine, bench.job(bytearray(2 * CHUNK), token=write.result))
    assert isinstance(read.error, Corrupt)


@pytest.mark.parametrize(
    "steps",
    [
        (PAGE_BYTES,),
        (PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES),
        (PAGE_BYTES + 512, 2 * PAGE_BYTES + 1),
    ],
)
def test_short_transfers_are_continued(bench: Bench, steps: tuple[int, ...]) -> None:
    """A short write would lose the rest; one of part of a page would go on unaligned."""
    data = bytearray(os.urandom(CHUNK))
    write = bench.run(bench.engine(in_steps(*steps)), bench.job(data))
    assert write.error is None
    back = bytearray(CHUNK)
    read = bench.run(bench.engine(in_steps(*steps)), bench.job(back, token=write.result))
    assert read.error is None
    assert back == data


def test_all_io_is_aligned(bench: Bench) -> None:
    """O_DIRECT refuses anything else, on some systems and devices; also after a short write."""
    misaligned: list[tuple[int, int, int]] = []

    def strict(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if address % PAGE_BYTES or len(buffer) % PAGE_BYTES or offset % PAGE_BYTES:
            misaligned.append((address, len(buffer), offset))
        return os.pwritev(fd, [buffer[: PAGE_BYTES + 1904]], offset)  # as with RLIMIT_FSIZE

    memory = mmap.mmap(-1, 3 * CHUNK)
    memory[:] = data = os.urandom(3 * CHUNK)
    write = WriteBlob(bench.file, CHUNK, memoryview(memory), Mode.FULL)
    job = Job("a", Priority.WRITE, len(data), write, bench.ended.append)
    assert bench.run(bench.engine(Io(pwritev=strict)), job).error is None
    assert misaligned == []
    assert os.pread(bench.fd, len(data), CHUNK) == data


@pytest.mark.parametrize("steps", [(0,), (512,), (PAGE_BYTES, 0)])
def test_no_progress_is_an_error(bench: Bench, steps: tuple[int, ...]) -> None:
    """A device that transfers nothing would be asked for ever."""
    job = bench.run(bench.engine(in_steps(*steps)), bench.job(bytearray(CHUNK)))
    assert isinstance(job.error, OSError)
    assert job.error.errno == errno.EIO
    assert f"of {CHUNK} bytes" in job.error.strerror


def test_end_of_file_is_an_error(bench: Bench) -> None:
    """A read of what was never written would return what stood in the slot before."""
    job = bench.run(bench.engine(), bench.job(bytearray(CHUNK), offset=1 << 20, token=b""))
    assert isinstance(job.error, OSError)
    assert job.error.errno == errno.EIO


def test_the_rest_of_a_failed_job_is_not_written(bench: Bench) -> None:
    """A failing device would be kept busy with what is lost already."""
    gate = Gate()
    calls = []

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if offset == 0:
            eventually(lambda: gate.running)
            raise OSError(errno.EIO, "injected")
        return gate(fd, buffers, offset)

    engine = bench.engine(Io(pwritev=pwritev))
    job = bench.job(bytearray(20 * CHUNK))
    engine.submit(job)
    eventually(lambda: job.error)
    assert job not in bench.ended, "ended while a piece of it runs"
    gate.open()
    bench.wait(job)
    assert isinstance(job.error, OSError)
    assert job.error.strerror == "injected"
    assert len(calls) == 2


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "x"), ValueError("x"), MemoryError(), SystemExit(1)]
)
def test_a_failure_is_the_jobs_alone(bench: Bench, error: BaseException) -> None:
    """An exception in one job would kill the thread, and in the end the daemon's I/O."""
    engine = bench.engine(Io(pwritev=failing(error, at=CHUNK)))
    for _ in range(5):
        assert bench.run(engine, bench.job(bytearray(3 * CHUNK))).error is error
    assert bench.run(engine, bench.job(bytearray(CHUNK))).error is None


def test_a_failing_checksum_fails_the_job(bench: Bench) -> None:
    """A job whose completion fails would never be answered."""
    engine = bench.engine()
    job = bench.run(engine, bench.job(bytearray(CHUNK), token=b"\x77 unknown kind"))
    assert bench.run(engine, bench.job(bytearray(CHUNK))).error is None
    assert job.error is not None


def test_threads_share_a_large_job(bench: Bench) -> None:
    """A large blob would be written by one thread while others have nothing to do."""
    gate = Gate()
    engine = bench.engine(Io(pwritev=gate), threads=4)
    job = bench.job(bytearray(10 * CHUNK))
    engine.submit(job)
    eventually(lambda: gate.running == 3)
    gate.open()
    bench.wait(job)
    assert job.error is None
    assert gate.calls == 10


def test_a_read_overtakes_writes(bench: Bench) -> None:
    """A blocked trainer would wait until all writes are done."""
    gate = Gate()
    engine = bench.engine(Io(pwritev=gate))
    writes = [bench.job(bytearray(4 * CHUNK)) for _ in range(5)]
    for write in writes:
        engine.submit(write)
    eventually(lambda: gate.running == 2)
    os.ftruncate(bench.fd, CHUNK)
    assert bench.run(engine, bench.job(bytearray(CHUNK), token=b"")).error is None
    assert bench.ended[0].priority is Priority.URGENT
    gate.open()
    bench.wait(*writes)


def test_cancel(bench: Bench) -> None:
    """A cancelled write would reach the device, or one that has begun would be lost."""
    gate = Gate()
    engine = bench.engine(Io(pwritev=gate), threads=2)
    begun, queued = bench.job(bytearray(2 * CHUNK)), bench.job(bytearray(CHUNK))
    engine.submit(begun)
    engine.submit(queued)
    eventually(lambda: gate.running == 1)
    assert not engine.cancel(begun)
    assert engine.cancel(queued)
    assert not engine.cancel(queued)
    gate.open()
    bench.wait(begun, queued)
    assert begun.error is None
    assert isinstance(queued.error, Cancelled)
    assert gate.calls == 2


def test_promote(bench: Bench) -> None:
    """A prefetch that a trainer waits for by now would stay behind the others."""
    order: list[int] = []
    gate = Gate()
    started = threading.Event()

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        order.append(offset)
        started.set()
        assert gate._open.wait(20)
        return len(buffers[0])

    engine = bench.engine(Io(preadv=preadv), threads=2)
    jobs = [
        bench.job(bytearray(CHUNK), offset=i * CHUNK, token=b"", priority=Priority.PREFETCH)
        for i in range(5)
    ]
    for job in jobs:
        engine.submit(job)
    eventually(lambda: len(order) == 2)
    engine.promote(jobs[4])
    gate.open()
    bench.wait(*jobs)
    assert order[2] == 4 * CHUNK


def test_drop_owner(bench: Bench) -> None:
    """A dead client's queue would keep the disk from the living."""
    gate = Gate()
    engine = bench.engine(Io(pwritev=gate), threads=2)
    dead = [bench.job(bytearray(3 * CHUNK), owner="dead") for _ in range(3)]
    living = bench.job(bytearray(CHUNK), owner="living")
    for job in (*dead, living):
        engine.submit(job)
    eventually(lambda: gate.running == 1)
    engine.drop_owner("dead")
    bench.wait(*dead[1:])
    assert dead[0] not in bench.ended, "its piece in flight still uses the arena"
    gate.open()
    bench.wait(*dead, living)
    assert all(isinstance(job.error, Cancelled) for job in dead)
    assert living.error is None
    assert gate.calls == 2


PIECES = [PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES]


def side_by_side(bench: Bench, *data: bytearray, owner: str = "a") -> list[Job]:
    """Writes one behind the other, in the order of the file."""
    offsets = itertools.accumulate(map(len, data), initial=0)
    return [
        bench.job(one, offset=offset, owner=owner)
        for one, offset in zip(data, offsets, strict=False)
    ]


def submit_together(engine: Engine, jobs: Sequence[Job]) -> None:
    engine.hold()
    for job in jobs:
        engine.submit(job)
    engine.let_go()


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (PAGE_BYTES,),
        (2 * PAGE_BYTES, PAGE_BYTES),
        (PAGE_BYTES + 512, PAGE_BYTES + 1, 512 + PAGE_BYTES),
    ],
)
def test_neighbours_are_one_call(bench: Bench, steps: tuple[int, ...]) -> None:
    """Each small blob would cost a call; or one would get another's bytes, or lose the end."""
    left = list(steps)
    calls: list[int] = []

    def shorter(call: Callable[[int, Sequence[memoryview], int], int]) -> Callable[..., int]:
        def transfer(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.append(offset)
            assert offset % PAGE_BYTES == 0
            if not left:
                return call(fd, buffers, offset)
            # What a short transfer leaves untouched, whatever buffers it ends in.
            most, part = left.pop(0), []
            for buffer in buffers:
                part.append(buffer[:most])
                most -= len(part[-1])
            return call(fd, [buffer for buffer in part if buffer], offset)

        return transfer

    io = Io(pwritev=shorter(os.pwritev), preadv=shorter(os.preadv))
    engine = bench.engine(io)
    data = [bytearray(os.urandom(size)) for size in PIECES]
    writes = side_by_side(bench, *data)
    submit_together(engine, writes)
    bench.wait(*writes)
    assert not any(job.error for job in writes)
    assert len(calls) == 1 + len(steps)
    calls.clear()
    left[:] = steps
    back = [bytearray(size) for size in PIECES]
    reads = [
        bench.job(one, offset=write.offset, token=write.result, priority=Priority.PREFETCH)
        for one, write in zip(back, writes, strict=True)
    ]
    submit_together(engine, reads[::-1])
    bench.wait(*reads)
    assert not any(job.error for job in reads)
    assert back == data
    assert len(calls) == 1 + len(steps)


@pytest.mark.parametrize("bad", range(3))
def test_a_bad_one_among_neighbours(bench: Bench, bad: int) -> None:
    """One bad page of the disk would fail the blobs around it."""
    data = [bytearray(os.urandom(PAGE_BYTES)) for _ in range(3)]
    writes = side_by_side(bench, *data)

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= bad * PAGE_BYTES < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "injected")
        return os.pwritev(fd, buffers, offset)

    submit_together(bench.engine(Io(pwritev=pwritev)), writes)
    bench.wait(*writes)
    assert [job.error is not None for job in writes] == [number == bad for number in range(3)]
    for number, job in enumerate(writes):
        if number != bad:
            assert job.result
            assert os.pread(bench.fd, PAGE_BYTES, job.offset) == data[number]


def test_a_corrupt_one_among_neighbours(bench: Bench) -> None:
    """Blobs would be verified against each other's checksum, or all fail with one."""
    engine = bench.engine()
    writes = side_by_side(bench, *[bytearray(os.urandom(PAGE_BYTES)) for _ in range(3)])
    submit_together(engine, writes)
    bench.wait(*writes)
    os.pwrite(bench.fd, bytes(PAGE_BYTES), PAGE_BYTES)
    reads = [
        bench.job(
            bytearray(PAGE_BYTES),
            offset=write.offset,
            token=write.result,
            priority=Priority.PREFETCH,
        )
        for write in writes
    ]
    submit_together(engine, reads)
    bench.wait(*reads)
    assert [type(job.error) for job in reads] == [type(None), Corrupt, type(None)]


def test_a_dropped_owner_is_not_tried_again(bench: Bench) -> None:
    """On a disk that fails slowly a dead client's memory would be held for minutes."""
    gate = Gate()
    tried: list[int] = []

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        tried.append(len(buffers))
        if len(tried) == 2:
            gate(fd, buffers, offset)
        raise OSError(errno.EIO, "injected")

    engine = bench.engine(Io(pwritev=pwritev))
    jobs = side_by_side(bench, *[bytearray(PAGE_BYTES) for _ in range(4)])
    submit_together(engine, jobs)
    eventually(lambda: gate.running)
    engine.drop_owner("a")
    gate.open()
    bench.wait(*jobs)
    assert tried == [4, 1]
    assert [type(job.error) for job in jobs] == [Cancelled, OSError, Cancelled, Cancelled]


def test_what_is_held(bench: Bench) -> None:
    """Small jobs would run one by one, an urgent read would wait, or a cancelled one be written."""
    gate = Gate()
    gate.open()
    engine = bench.engine(Io(pwritev=gate))
    os.ftruncate(bench.fd, CHUNK)
    engine.hold()
    small, cancelled = side_by_side(bench, bytearray(PAGE_BYTES), bytearray(PAGE_BYTES))
    engine.submit(small)
    engine.submit(cancelled)
    assert engine.cancel(cancelled)
    bench.wait(cancelled)
    assert isinstance(cancelled.error, Cancelled)
    bench.wait(small)  # the cancellation handed over what was there
    bench.wait(bench.run(engine, bench.job(bytearray(PAGE_BYTES), token=b"")))
    bench.wait(bench.run(engine, bench.job(bytearray(CHUNK))))
    assert gate.calls == 2
    last = bench.job(bytearray(PAGE_BYTES))
    engine.submit(last)
    assert last.taken_bytes == 0
    engine.let_go()
    bench.wait(last)


def test_idle_threads_use_no_cpu(bench: Bench) -> None:
    """Idle daemons would take time from trainers: threads must block, not poll."""
    bench.run(bench.engine(threads=8), bench.job(bytearray(CHUNK)))
    before = os.times()
    assert not threading.Event().wait(0.3)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1


def test_many_jobs_of_many_owners(bench: Bench) -> None:
    """Under load a job would be lost, or end twice."""
    engine = bench.engine(threads=4)
    jobs = [
        bench.job(bytearray(CHUNK + PAGE_BYTES), offset=i * 2 * CHUNK, owner=str(i % 5))
        for i in range(400)
    ]
    for job in jobs:
        engine.submit(job)
    bench.wait(*jobs)
    assert not any(job.error for job in jobs)


def test_buffered_files_are_written_back(tmp_path: Path) -> None:
    """Without O_DIRECT the page cache would fill, and an error of the device would be lost."""
    flushed = []
    bench = Bench(tmp_path / "file")
    bench.file.direct = False
    engine = bench.engine(Io(write_back=lambda fd, offset, length: flushed.append(length)))
    assert bench.run(engine, bench.job(bytearray(2 * CHUNK))).error is None
    assert flushed == [CHUNK, CHUNK]

    def failing_flush(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "write-back failed")

    job = bench.run(bench.engine(Io(write_back=failing_flush)), bench.job(bytearray(CHUNK)))
    assert isinstance(job.error, OSError)
    for engine in bench.engines:
        engine.stop()
    bench.file.close(discard=True)


class Apart:
    """In place of a file that cannot be told from another one."""

    def __init__(self) -> None:
        self.fails = True

    def __ne__(self, other: object) -> bool:
        if self.fails:
            raise RuntimeError("these cannot be compared")
        return self is not other

    def __eq__(self, other: object) -> bool:
        return not self != other

    __hash__ = object.__hash__


@pytest.mark.parametrize("good", [0, 1, 2])
def test_an_error_before_a_piece_is_answered(bench: Bench, good: int) -> None:
    """The thread would end without a word, and so would the next one, until nothing is served.

    ``good`` jobs are put together with the leader before the one that cannot be.
    """
    engine = bench.engine(threads=2)
    jobs = side_by_side(bench, *[bytearray(PAGE_BYTES) for _ in range(good + 2)])
    apart = Apart()
    jobs[-1].file = apart
    for _ in range(3):  # more often than there are threads
        bench.ended.clear()
        for job in jobs:
            job.taken_bytes, job.error, job.joined = 0, None, False
        apart.fails = True
        submit_together(engine, jobs)
        bench.wait(*jobs[:-1])
        assert all("cannot be compared" in str(job.error) for job in jobs[:-1])
        bench.wait(*jobs)
        assert jobs[-1].error is None, "it was not taken yet, and runs by itself"
    assert bench.run(engine, bench.job(bytearray(CHUNK))).error is None


def test_a_thread_does_not_end_unseen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon would go on with fewer threads, and at last none: trainers wait for ever."""
    engine = bench.engine(threads=2)
    raised: list[BaseException] = []

    def post(*callbacks: Callable[[], None]) -> None:
        for callback in callbacks:
            try:
                callback()
            except EngineFailed as error:
                raised.append(error)

    def pop() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "_post", post)
    monkeypatch.setattr(engine._schedule, "pop", pop)
    engine.submit(bench.job(bytearray(CHUNK)))
    eventually(lambda: raised)
    assert "a bug" in str(raised[0])
