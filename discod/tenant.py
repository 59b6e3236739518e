"""One attached client as the daemon knows it: its arena, files, unanswered requests, counters.

Every request is checked here before it reaches the engine. What a request means is in
:mod:`discod.wire.messages`; where messages come from and answers go to is the server's.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from discod import checksum
from discod.bounds import Refusal, check_pages, check_range
from discod.client_report import Told, WaitSpan, spans_of
from discod.engine import Engine, Job
from discod.failures import failed
from discod.gpus import Gpus
from discod.mapping import Mapping
from discod.recorder import Source, source
from discod.rings import Rings
from discod.schedule import Priority
from discod.scratch_file import ScratchFile
from discod.traffic import Traffic
from discod.transfer import OutOfUse, ReadBlob, WriteBlob
from discod.wire.messages import (
    Cancel,
    CloseRing,
    CopyIn,
    CopyOut,
    Done,
    Failed,
    Failure,
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
from discod.writes import Held, Writes

MAX_UNANSWERED = 32_768
"""Per client; a bound on what one that has lost its mind can make the daemon keep."""

MAX_FILE_BYTES = 1 << 62
"""Beyond any file system, and far below where offset arithmetic could overflow."""


@dataclass(frozen=True, slots=True)
class Who:
    """Whom the daemon serves: for the log and the status alone."""

    pid: int
    uid: int
    rank: int
    command: str = ""

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank >= 0 else ""
        return f"pid {self.pid or 'unknown'} (uid {self.uid}{rank})"


class File:
    """A scratch file and the engine of the device it is on.

    Args:
        traffic: Counts what goes by in its directory.

    Attributes:
        busy: Requests on it that are not answered.
        idle_since: When ``busy`` last fell to 0, by the monotonic clock.
        trim_bytes: What the last ``Trim`` asked for, until a write makes it void.
    """

    def __init__(
        self,
        scratch: ScratchFile,
        engine: Engine,
        directory: int,
        traffic: Traffic | None = None,
    ) -> None:
        self.scratch = scratch
        self.engine = engine
        self.directory = directory
        self.traffic = traffic or Traffic()
        self.busy = 0
        self.idle_since = time.monotonic()
        self.trim_bytes: int | None = None


class Tenant:
    """An attached client.

    Args:
        who: The process.
        epoch: The daemon's.
        mapping: Its arena.
        files: Its scratch files, in the order in which requests number them.
        mode: The checksum to take of what is written.
        gpus: The GPUs that it may have rings on.
        answer: Sends a reply to the client.
        idle: Called when a file that is to be trimmed has nothing left to do.
        step_bytes: As for :func:`discod.checksum.take`.
        writes: Counts what goes to the disks, and may hold it up; None: nothing does.
        waited: Called with the waits that the client reports.

    Attributes:
        traffic: What was written and read for it here.
        told: What it says of itself.
        attached_at: By the monotonic clock.
    """

    def __init__(
        self,
        who: Who,
        epoch: int,
        mapping: Mapping,
        files: Sequence[File],
        mode: checksum.Mode,
        gpus: Gpus,
        answer: Callable[[Reply], None],
        idle: Callable[[File], None],
        step_bytes: int = checksum.SAMPLE_STEP_BYTES,
        writes: Writes | None = None,
        waited: Callable[[Source, Sequence[WaitSpan]], None] = lambda source, spans: None,
    ) -> None:
        self.who = who
        self.arena_bytes = mapping.size_bytes
        self.files = files
        self.traffic = Traffic()
        self.attached_at = time.monotonic()
        self.told = Told(self.attached_at)
        self._source = source(who.pid, who.rank)
        self._epoch = epoch
        self._mapping = mapping
        self._mode = mode
        self._step_bytes = step_bytes
        self._answer = answer
        self._idle = idle
        self._waited = waited
        self._jobs: dict[int, tuple[Job, Engine]] = {}
        self._writes = writes or Writes()
        self._held: dict[int, tuple[Write, Held]] = {}
        self._rings = Rings(who, gpus, mapping.fd, mapping.size_bytes, answer)
        self._closed: Callable[[], None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests that are queued or running."""
        return len(self._jobs) + len(self._held) + len(self._rings.unanswered)

    @property
    def closing(self) -> bool:
        return self._closed is not None

    @property
    def disk_bytes(self) -> int:
        return sum(file.scratch.allocated_bytes for file in self.files)

    def handle(self, request: Request) -> None:
        """Start or answer ``request``: it gets exactly one answer, now or when its job ends."""
        try:
            if request.epoch != self._epoch:
                raise Refusal(f"epoch {request.epoch} is not this daemon's, {self._epoch}")
            match request:
                case Write():
                    self._write(request)
                case Read():
                    self._read(request)
                case Trim():
                    self._trim(request)
                    self._done(request)
                case Cancel():
                    self._cancel(request.target)
                    self._done(request)
                case Promote():
                    self._promote(request.target)
                    self._done(request)
                case Ping():
                    self._done(request)
                case Report():
                    spans = spans_of(request)
                    self.told.take(request, time.monotonic())
                    self._waited(self._source, spans)
                    self._done(request)
                case OpenRing() | CloseRing() | CopyOut() | CopyIn():
                    self._check_seq(request.seq)
                    self._rings.handle(request)
        except Refusal as refusal:
            text = f"{type(request).__name__} refused: {refusal}"
            self._answer(Failed(request.seq, request.epoch, Failure.REFUSED, 0, text))

    def close(self, closed: Callable[[], None]) -> None:
        """Cancel what is queued; no more answers.

        Args:
            closed: Called once nothing runs any more, and no GPU has anything of the client's.
        """
        self._closed = closed
        for file in self.files:
            file.trim_bytes = None
        self._held.clear()
        self._writes.leave(self)
        for engine in {file.engine for file in self.files}:
            engine.drop_owner(self)
        self._rings.close(self._part_closed)

    def _part_closed(self) -> None:
        if self._closed is not None and not self._jobs and self._rings.closed:
            self._closed()

    def free(self, *, discard: bool = True) -> None:
        """Unmap and close everything, after :meth:`close` has called back. Slow; in any thread.

        Args:
            discard: Free its disk space even if somebody still holds the files.
        """
        with ExitStack() as rest:
            for file in self.files:
                rest.callback(file.scratch.close, discard=discard)
            self._mapping.close()

    def unmap(self) -> None:
        """As :meth:`free`, but the files stay open and counted: they are the caller's."""
        self._mapping.close()

    def _write(self, request: Write) -> None:
        file = self._check(request)
        file.trim_bytes = None
        if self._refused(file):
            # At once, and not behind all that is queued on the device.
            self._fail(request, file, failed(request, file.scratch, OutOfUse(), self.who))
            return
        held = self._writes.admit(
            self,
            request.length,
            partial(self._start_write, request, file),
            partial(self._over_budget, request, file),
        )
        if held is not None:
            self._held[request.seq] = request, held

    def _start_write(self, request: Write, file: File) -> None:
        self._held.pop(request.seq, None)
        file.trim_bytes = None
        file.scratch.keep()
        data = self._mapping.view(request.slot, request.length)
        refused = partial(self._refused, file)
        work = WriteBlob(file.scratch, request.offset, data, self._mode, self._step_bytes, refused)
        self._start(request, file, Priority.WRITE, work)

    def _over_budget(self, request: Write, file: File, text: str) -> None:
        self._held.pop(request.seq, None)
        reply = Failed(request.seq, request.epoch, Failure.OVER_BUDGET, 0, text)
        self._fail(request, file, reply)

    def _refused(self, file: File) -> bool:
        """Whether ``file`` takes no writes: its directory is out of use, and there is a better."""
        return not file.scratch.health.in_use and any(
            other.scratch.health.in_use for other in self.files
        )

    def _read(self, request: Read) -> None:
        file = self._check(request)
        if not checksum.valid(request.checksum):
            raise Refusal("its checksum is none of this daemon's")
        data = self._mapping.view(request.slot, request.length)
        work = ReadBlob(file.scratch, request.offset, data, request.checksum)
        priority = Priority.URGENT if request.urgent else Priority.PREFETCH
        self._start(request, file, priority, work)

    def _start(
        self, request: Write | Read, file: File, priority: Priority, work: WriteBlob | ReadBlob
    ) -> None:
        ended = partial(self._ended, request, file)
        job = Job(self, priority, request.length, work, ended, self._source)
        self._jobs[request.seq] = job, file.engine
        file.busy += 1
        file.engine.submit(job)

    def _trim(self, request: Trim) -> None:
        file = self._file(request.file)
        check_pages(size=request.size)
        if request.size < 0:
            raise Refusal(f"size {request.size} is negative")
        file.trim_bytes = request.size
        if not file.busy:
            self._idle(file)

    def _cancel(self, target: int) -> None:
        if target in self._held:
            request, held = self._held.pop(target)
            self._writes.cancel(held)
            self._answer(
                Failed(
                    request.seq, request.epoch, Failure.CANCELLED, 0, "cancelled before it began"
                )
            )
        if target in self._jobs:
            job, engine = self._jobs[target]
            engine.cancel(job)

    def _promote(self, target: int) -> None:
        if target in self._jobs:
            job, engine = self._jobs[target]
            engine.promote(job)

    def _file(self, number: int) -> File:
        if not 0 <= number < len(self.files):
            raise Refusal(f"file {number} of {len(self.files)}")
        return self.files[number]

    def _check(self, request: Write | Read) -> File:
        check_pages(offset=request.offset, slot=request.slot, length=request.length)
        check_range(request.slot, request.length, self.arena_bytes, "its arena")
        check_range(request.offset, request.length, MAX_FILE_BYTES, "any file")
        self._check_seq(request.seq)
        return self._file(request.file)

    def _check_seq(self, seq: int) -> None:
        if seq in self._jobs or seq in self._held or seq in self._rings.unanswered:
            raise Refusal("a request with this seq is not answered yet")
        if self.in_flight >= MAX_UNANSWERED:
            raise Refusal(f"{MAX_UNANSWERED} requests of this client are not answered yet")

    def _done(self, request: Request, checksum: bytes = b"") -> None:
        self._answer(Done(request.seq, request.epoch, checksum))

    def _fail(self, request: Write | Read, file: File, reply: Failed) -> None:
        if reply.kind != Failure.CANCELLED:
            for traffic in (self.traffic, file.traffic):
                flow = traffic.written if isinstance(request, Write) else traffic.read
                flow.failures[reply.kind] += 1
        self._answer(reply)

    def _ended(self, request: Write | Read, file: File, job: Job) -> None:
        """The job has ended, on the event loop."""
        del self._jobs[request.seq]
        file.busy -= 1
        now = file.idle_since = time.monotonic()
        if isinstance(request, Write) and job.taken_bytes == 0:
            self._writes.undone(self, request.length)
        if self._closed is not None:
            self._part_closed()
            return
        if job.error is not None:
            self._fail(request, file, failed(request, file.scratch, job.error, self.who))
        else:
            for traffic in (self.traffic, file.traffic):
                flow = traffic.written if isinstance(request, Write) else traffic.read
                flow.add(request.length, now)
            self._done(request, job.result)
        if file.trim_bytes is not None and not file.busy:
            self._idle(file)
