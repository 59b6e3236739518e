"""The I/O threads of one device: they run jobs piece by piece, in the schedule's order.

The engine knows no clients and no ZeroMQ: an owner is any hashable, and the end of a job is a
callback that it posts to the event loop. What a piece does is in :mod:`discod.transfer`, what
runs next in :mod:`discod.schedule`.

No thread ends by itself: an error that some jobs can be blamed for is theirs; any other, which can
only be a bug, is raised on the event loop (:class:`EngineFailed`) and ends the daemon. Fewer
threads, or none, would go on as if nothing were wrong, and trainers wait for ever.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

from discod.io import Io
from discod.recorder import NOBODY, Recorder, Source
from discod.schedule import Entry, Priority, Schedule

_log = logging.getLogger(__name__)

MOST_HELD = 256
"""Small jobs that wait for more: as many as run together, and some milliseconds of the loop."""


class Work(Protocol):
    """What a job does.

    Attributes:
        file: Works of one kind on one file whose extents touch can run together.
        offset: Where in ``file`` its extent begins.
    """

    @property
    def file(self) -> Hashable: ...

    @property
    def offset(self) -> int: ...

    def run(self, io: Io, start: int, length: int) -> None:
        """Do one piece. Pieces of one job run in several threads at once."""

    def run_with(self, io: Io, others: Sequence[Any]) -> None:
        """Do all of it and of ``others``, in one piece. When it fails any part may be done."""

    def complete(self) -> bytes:
        """After all pieces have succeeded, in the thread that ran the last: the job's result."""


class Post(Protocol):
    """Hands callbacks to the event loop, from any thread."""

    def __call__(self, *callbacks: Callable[[], None]) -> None: ...


class Cancelled(Exception):
    """The job was cancelled. Unless its owner was dropped, no piece of it ever ran."""


class EngineFailed(Exception):
    """A thread of an engine has failed at no job's own work, and has ended."""


class Job(Entry):
    """One read or write.

    Args:
        owner: Whom fairness is between.
        priority: The class to queue it in.
        size_bytes: Its size, for the schedule.
        work: What it does.
        done: Called on the event loop when it has ended, with the job.
        source: Whose it is, for the records of its calls.

    Attributes:
        error: None when it succeeded, else what failed first.
        result: What ``work.complete`` returned.
        queued_ns: When it was made, by the monotonic clock.
    """

    __slots__ = ("done", "error", "queued_ns", "result", "source", "work")

    def __init__(
        self,
        owner: Hashable,
        priority: Priority,
        size_bytes: int,
        work: Work,
        done: Callable[["Job"], None],
        source: Source = NOBODY,
    ) -> None:
        super().__init__(owner, priority, size_bytes, work.file, work.offset)
        self.work = work
        self.done = done
        self.source = source
        self.queued_ns = time.monotonic_ns()
        self.error: BaseException | None = None
        self.result = b""


class Engine:
    """A pool of threads, which block while there is nothing to do.

    Its methods are for one thread, the event loop's.

    Args:
        threads: At least 2, so that writes leave one to reads.
        chunk_bytes: Most bytes of one piece.
        post: Hands callbacks to the event loop, from any thread.
        io: The system calls.
        name: For the threads' names.
        recorder: Where each call is recorded, under the engine's lock.
    """

    def __init__(
        self,
        threads: int,
        chunk_bytes: int,
        post: Post,
        io: Io | None = None,
        name: str = "io",
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder or Recorder(1)
        self._schedule: Schedule[Job] = Schedule(threads, chunk_bytes)
        self._post = post
        self._io = io or Io()
        self._lock = threading.Lock()
        self._idle: list[threading.Lock] = []
        """What the threads that have nothing to do wait for; the last one is woken first."""
        self._stopping = False
        self._holding = False
        self._to_retry: set[Job] = set()
        """Of jobs that failed together, those whose own turn has not come."""
        self._held: list[Job] = []
        self._held_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def hold(self) -> None:
        """Until :meth:`let_go`, have small jobs wait for more, but for urgent reads.

        So that a thread wakes up once for all that are one piece.
        """
        self._holding = True

    def let_go(self) -> None:
        """End :meth:`hold`."""
        self._holding = False
        if self._held:
            self._flush()

    def submit(self, job: Job) -> None:
        """Queue ``job``; its ``done`` is called exactly once."""
        self._held.append(job)
        self._held_bytes += job.size_bytes
        full = self._held_bytes >= self._chunk_bytes or len(self._held) >= MOST_HELD
        if full or not self._holding or job.priority is Priority.URGENT:
            self._flush()

    def cancel(self, job: Job) -> bool:
        """Cancel ``job`` unless a piece of it has begun. True when it is cancelled."""
        with self._lock:
            self._push_held()
            cancelled = self._schedule.cancel(job)
            bell = self._bell()
        _ring(bell)
        if cancelled:
            self._end([job], Cancelled())
        return cancelled

    def promote(self, job: Job) -> None:
        """Make a prefetch read urgent."""
        with self._lock:
            self._push_held()
            self._schedule.promote(job)
            bell = self._bell()
        _ring(bell)

    def drop_owner(self, owner: Hashable) -> None:
        """Cancel all of ``owner``, also jobs that have begun: only pieces that run run on."""
        with self._lock:
            self._push_held()
            dropped = self._schedule.drop_owner(owner)
            for job in dropped:
                job.error = job.error or Cancelled()
            for job in self._to_retry:
                if job.owner == owner:
                    job.error = job.error or Cancelled()
            ended = [job for job in dropped if job.running == 0]
            bell = self._bell()
        _ring(bell)
        self._end(ended)

    def calls(self, first: int) -> tuple[int, bytes, int]:
        """What :meth:`discod.recorder.Recorder.part` gives, and how many calls were recorded."""
        with self._lock:
            return *self._recorder.part(first), self._recorder.end

    def stop(self) -> None:
        """End the threads, once what they run has ended. Nothing may be queued any more."""
        with self._lock:
            self._stopping = True
            idle, self._idle = self._idle, []
        for bell in idle:
            bell.release()
        for thread in self._threads:
            thread.join()

    def _flush(self) -> None:
        """Queue what is held, and have a thread come for it."""
        with self._lock:
            self._push_held()
            bell = self._bell()
        _ring(bell)

    def _push_held(self) -> None:
        """Queue what is held; the caller has the lock, and rings when it has done the rest."""
        for job in self._held:
            self._schedule.push(job)
        self._held.clear()
        self._held_bytes = 0

    def _bell(self) -> "threading.Lock | None":
        """What to release so that a thread comes for what can run; the caller has the lock."""
        return self._idle.pop() if self._idle and self._schedule.ready else None

    def _end(self, jobs: Sequence[Job], error: BaseException | None = None) -> None:
        if error is not None:
            for job in jobs:
                job.error = job.error or error
        if jobs:
            self._post(*[partial(job.done, job) for job in jobs])

    def _serve(self, thread: int) -> None:
        # Signals belong to the main thread; here one would only cut a system call short.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._work(thread)
        except BaseException as error:  # noqa: BLE001  nobody else would ever hear of it
            name = threading.current_thread().name
            _log.critical("I/O thread %s has failed: the daemon ends", name, exc_info=True)
            failure = EngineFailed(
                f"I/O thread {name} has failed ({error!r}), so that what is queued may never run: "
                "the daemon ends. Trainers keep what they have and go on with the next daemon. "
                "This is a bug of discod; please report it with the log"
            )
            failure.__cause__ = error
            self._post(partial(_raise, failure))

    def _work(self, thread: int) -> None:
        """Run pieces until :meth:`stop`."""
        bell = threading.Lock()
        bell.acquire()
        while (piece := self._next(bell)) is not None:
            job, start, length, joined = piece
            if joined:
                self._run_joined([job, *joined], thread)
            else:
                self._run(job, start, length, thread)
            # An idle thread must not keep the job, its client and its buffer alive.
            del piece, job, joined

    def _next(self, bell: threading.Lock) -> tuple[Job, int, int, list[Job]] | None:
        while True:
            with self._lock:
                piece = self._schedule.pop()
                if piece is not None:
                    job, start, length = piece
                    joined: list[Job] = []
                    failure = self._join(job, joined) if length == job.size_bytes else None
                    other = self._bell()
                elif self._stopping:
                    return None
                else:
                    self._idle.append(bell)
            if piece is None:
                bell.acquire()
                continue
            _ring(other)
            if failure is None:
                return job, start, length, joined
            jobs = [job, *joined]
            del piece, job, joined
            self._fail(jobs, failure)
            del jobs, failure

    def _join(self, job: Job, joined: list[Job]) -> Exception | None:
        """Take what can run together with ``job``; why that has failed. Needs the lock."""
        try:
            self._schedule.join(job, joined)
        except Exception as error:  # noqa: BLE001  that of the job, or of one next to it
            return error
        return None

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Answer jobs that were taken, of which nothing has run."""
        _log.error("jobs could not be put together", exc_info=error)
        with self._lock:
            # The leader's place among the threads is given up last.
            for job in [*jobs[1:], jobs[0]]:
                self._finish(job, error)
        self._end(jobs)

    def _run(self, job: Job, start: int, length: int, thread: int) -> None:
        error: BaseException | None = None
        kind = job.priority  # which may be promoted while it runs
        began_ns = time.monotonic_ns()
        try:
            job.work.run(self._io, start, length)
        except BaseException as failure:  # noqa: BLE001  any failure is the job's alone
            error = failure
        ended_ns = time.monotonic_ns()
        with self._lock:
            self._recorder.call(
                kind, thread, job.source, length, 1, job.queued_ns, began_ns, ended_ns, error
            )
            ended = self._finish(job, error)
        if ended:
            self._complete([job])

    def _run_joined(self, jobs: Sequence[Job], thread: int) -> None:
        """Run jobs in one piece; if that fails each by itself, so that only bad ones fail."""
        leader = jobs[0]
        kind, length = leader.priority, sum(job.size_bytes for job in jobs)
        error: BaseException | None = None
        began_ns = time.monotonic_ns()
        try:
            leader.work.run_with(self._io, [job.work for job in jobs[1:]])
        except BaseException as failure:  # noqa: BLE001  whose failure it is, is found out now
            error = failure.with_traceback(None)  # which would keep the jobs
        times = leader.queued_ns, began_ns, time.monotonic_ns()
        with self._lock:
            self._recorder.call(kind, thread, leader.source, length, len(jobs), *times, error)
            if error is None:
                for job in jobs:
                    self._finish(job, None)
        if error is None:
            self._complete(jobs)
        else:
            self._run_each(jobs, thread)

    def _run_each(self, jobs: Sequence[Job], thread: int) -> None:
        """Run whole jobs one by one, except for those of an owner that is dropped meanwhile.

        Each ends at once, so that the others are refused once it has shown that the device fails.
        """
        with self._lock:
            self._to_retry.update(jobs)
        # The leader's place among the threads is given up last.
        for job in [*jobs[1:], jobs[0]]:
            with self._lock:
                self._to_retry.discard(job)
            if job.error is None:
                self._run(job, 0, job.size_bytes, thread)
            else:
                with self._lock:
                    self._finish(job, None)
                self._complete([job])

    def _finish(self, job: Job, error: BaseException | None) -> bool:
        """Account for a piece that ended; True when the job ended with it. Needs the lock."""
        last = self._schedule.finish(job)
        if error is not None:
            job.error = job.error or error
            last = self._schedule.drop(job)
        return last

    def _complete(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.error is None:
                try:
                    job.result = job.work.complete()
                except BaseException as failure:  # noqa: BLE001  any failure is the job's alone
                    job.error = failure
        self._end(jobs)


def _raise(error: EngineFailed) -> None:
    raise error


def _ring(bell: "threading.Lock | None") -> None:
    """Have the thread come that waits for ``bell``; None: there is no need."""
    if bell is not None:
        bell.release()
