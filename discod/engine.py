"""The I/O threads of one device: they run jobs piece by piece, in the schedule's order.

The engine knows no clients and no ZeroMQ: an owner is any hashable, and the end of a job is a
callback that it posts to the event loop. What a piece does is in :mod:`discod.transfer`, what
runs next in :mod:`discod.schedule`.
"""

import signal
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

from discod.io import Io
from discod.schedule import Entry, Priority, Schedule


class Work(Protocol):
    """What a job does."""

    def run(self, io: Io, start: int, length: int) -> None:
        """Do one piece. Pieces of one job run in several threads at once."""

    def complete(self) -> bytes:
        """After all pieces have succeeded, in the thread that ran the last: the job's result."""


class Cancelled(Exception):
    """The job was cancelled. Unless its owner was dropped, no piece of it ever ran."""


class Job(Entry):
    """One read or write.

    Args:
        owner: Whom fairness is between.
        priority: The class to queue it in.
        size_bytes: Its size, for the schedule.
        work: What it does.
        done: Called on the event loop when it has ended, with the job.

    Attributes:
        error: None when it succeeded, else what failed first.
        result: What ``work.complete`` returned.
    """

    __slots__ = ("done", "error", "result", "work")

    def __init__(
        self,
        owner: Hashable,
        priority: Priority,
        size_bytes: int,
        work: Work,
        done: Callable[["Job"], None],
    ) -> None:
        super().__init__(owner, priority, size_bytes)
        self.work = work
        self.done = done
        self.error: BaseException | None = None
        self.result = b""


class Engine:
    """A pool of threads, which block while there is nothing to do.

    Args:
        threads: At least 2, so that writes leave one to reads.
        chunk_bytes: Most bytes of one piece.
        post: Hands a callback to the event loop, from any thread.
        io: The system calls.
        name: For the threads' names.
    """

    def __init__(
        self,
        threads: int,
        chunk_bytes: int,
        post: Callable[[Callable[[], None]], None],
        io: Io | None = None,
        name: str = "io",
    ) -> None:
        self._schedule: Schedule[Job] = Schedule(threads, chunk_bytes)
        self._post = post
        self._io = io or Io()
        self._wake = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue ``job``; its ``done`` is called exactly once."""
        with self._wake:
            self._schedule.push(job)
            self._wake.notify()

    def cancel(self, job: Job) -> bool:
        """Cancel ``job`` unless a piece of it has begun. True when it is cancelled."""
        with self._wake:
            cancelled = self._schedule.cancel(job)
        if cancelled:
            self._end(job, Cancelled())
        return cancelled

    def promote(self, job: Job) -> None:
        """Make a prefetch read urgent."""
        with self._wake:
            self._schedule.promote(job)

    def drop_owner(self, owner: Hashable) -> None:
        """Cancel all of ``owner``, also jobs that have begun: only pieces that run run on."""
        with self._wake:
            dropped = self._schedule.drop_owner(owner)
            for job in dropped:
                job.error = job.error or Cancelled()
            ended = [job for job in dropped if job.running == 0]
        for job in ended:
            self._end(job, Cancelled())

    def stop(self) -> None:
        """End the threads, once what they run has ended. Nothing may be queued any more."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _end(self, job: Job, error: BaseException | None) -> None:
        job.error = job.error or error
        self._post(partial(job.done, job))

    def _serve(self) -> None:
        # Signals belong to the main thread; here one would only cut a system call short.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (piece := self._next()) is not None:
            self._run(*piece)
            del piece  # an idle thread must not keep the job, its client and its buffer alive

    def _run(self, job: Job, start: int, length: int) -> None:
        error: BaseException | None = None
        try:
            job.work.run(self._io, start, length)
        except BaseException as failure:  # noqa: BLE001  any failure is the job's alone
            error = failure
        if self._finish(job, error):
            self._complete(job)

    def _next(self) -> tuple[Job, int, int] | None:
        with self._wake:
            while (piece := self._schedule.pop()) is None:
                if self._stopping:
                    return None
                self._wake.wait()
            if self._schedule.ready:
                self._wake.notify()
            return piece

    def _finish(self, job: Job, error: BaseException | None) -> bool:
        """Account for a piece that ended; True when the job ended with it."""
        with self._wake:
            last = self._schedule.finish(job)
            if error is not None:
                job.error = job.error or error
                last = self._schedule.drop(job)
            return last

    def _complete(self, job: Job) -> None:
        error: BaseException | None = None
        if job.error is None:
            try:
                job.result = job.work.complete()
            except BaseException as failure:  # noqa: BLE001  any failure is the job's alone
                error = failure
        self._end(job, error)
