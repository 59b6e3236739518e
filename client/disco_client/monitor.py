"""The one lock of a session: its sections, its waits, and what finalizers drop.

No thread runs here between calls. A call that changes something does it in a section, which takes
in what the daemon has answered; a call that must wait does so between sections.

*Why finalizers cannot deadlock.* A handle or a loaded view may be collected at any moment, also
inside a section that holds the lock, on the same thread. A finalizer therefore only appends to a
queue, and works it off when nobody holds the lock; whoever holds it looks at the queue once more
after letting go (:meth:`Monitor.change`).

*Why a waiter misses nothing.* ZeroMQ's fd signals edges, and any call on the socket may eat one.
So whatever changes anything raises ``changes`` and wakes the thread that polls; and a thread that
is about to wait does not, when ``changes`` has moved since it looked (:meth:`Monitor.pause`).

*Why an interrupt cannot leave half a change.* A KeyboardInterrupt may come between any two
instructions. One that comes inside a section leaves the monitor torn, and every later call says so
instead of going on; waits and copies, where nearly all of the time is spent, are outside.

*Why an interrupt cannot leave a poller behind.* One that is not there would have all others sleep,
and :meth:`Monitor.close` wait for it. It is set inside of the ``try`` whose ``finally`` undoes it,
by one store that needs no lock and comes before anything that a signal could interrupt. Nobody who
sleeps holds the lock or takes it to wake up: a condition's ``wait`` does, and an interrupt there
would end in a release of what another thread holds.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from disco_client.errors import DiscodError, HandleReleased, UsageError
from disco_client.link import Link
from disco_client.staging import POLL_SECONDS

_Dropped = TypeVar("_Dropped")
_Value = TypeVar("_Value")


class Copies(Protocol):
    """Copies under way (:class:`disco_client.staging.Staging`)."""

    @property
    def pending(self) -> bool:
        """Whether there are any."""

    def settle(self) -> bool:
        """Take in those that have ended; whether there was any."""


class Monitor(Generic[_Dropped]):
    """Mutual exclusion over one link. See the module's text for its rules.

    Args:
        link: Whose answers are taken in, and which is polled while waiting.
        take_drop: Takes in one thing that a finalizer dropped; runs inside of a section.
        copies: Looked at in each section, and often while waiting.
    """

    def __init__(self, link: Link, take_drop: Callable[[_Dropped], None], copies: Copies) -> None:
        self.forked = False
        """Whether this is the copy of a child process, in which nothing works."""
        self.changes = 0
        """Raised with every change that somebody may wait for."""
        self._link = link
        self._take_drop = take_drop
        self._copies = copies
        self._lock = threading.Lock()
        self._bells: list[threading.Lock] = []
        """Of the threads that sleep; each is held, and released once, by whoever takes it out."""
        self._holder: int | None = None
        self._poller: int | None = None
        self._torn = False
        self._closed = False
        self._dropped: deque[_Dropped] = deque()

    def change(self, action: Callable[..., _Value], *args: Any, settle: bool = True) -> _Value:
        """What ``action(*args)`` gives, run with the lock held: one section.

        Args:
            action: The change.
            args: Its arguments.
            settle: Take in what the daemon has answered first.
        """
        me = threading.get_ident()
        if self.forked or self._closed or me == self._holder:
            self._refuse(me)
        with self._lock:
            # Nothing between the lock and this store at which a signal handler could run.
            self._holder = me
            try:
                if self.forked or self._closed or self._torn:
                    self._refuse(None)
                self._torn = True
                try:
                    if settle:
                        self._settle()
                    value = action(*args)
                    if self._poller is not None:  # an edge that it waits for may have been eaten
                        self._settle()
                except (DiscodError, TimeoutError):
                    if self._poller is not None:
                        self._settle()
                    self._torn = False
                    raise
                self._torn = False
            finally:
                self._holder = None
        if self._dropped:
            self._work_off()
        return value

    def tear(self) -> None:
        """Serve no further call: something goes on that was to have ended."""
        self._torn = True

    def _refuse(self, me: int | None) -> None:
        """Raise when no call can be served; ``me``: the calling thread, not in a section yet."""
        if self.forked:
            raise HandleReleased(
                "this handle belongs to the process that forked this one; a blob can be loaded "
                "only where it was saved"
            )
        if me is not None and me == self._holder:
            raise UsageError(
                "called in a signal handler that interrupted another call of discod in this "
                "thread; set a flag there and call after it. close() is allowed"
            )
        if self._closed:
            raise HandleReleased(
                "this process has detached from the daemon (close()), and what it had saved by "
                "then is gone; run every backward that needs it before close()"
            )
        if me is None and self._torn:  # before the lock, it may be another thread's
            raise UsageError(
                "an earlier call was interrupted (Ctrl-C?) in the middle of a change, so what is "
                "saved cannot be trusted any more; disco_client.close() and attach again"
            )

    def _settle(self) -> None:
        """Take in every reply, copy and drop, and tell the waiters when there were any."""
        copies = self._copies
        quiet = self._link.quiet()  # then neither drain() nor check(), which cost more, need look
        if quiet and not (self._dropped or copies.pending):
            return
        changed = False
        while (
            (not quiet and self._link.drain())
            or self._dropped
            or (copies.pending and copies.settle())
        ):
            changed = True
            while self._dropped:
                self._take_drop(self._dropped.popleft())
        if not quiet:
            self._link.check(blocked=False)
        if changed:
            self.tell_waiters()

    def tell_waiters(self) -> None:
        """Something changed that another thread may wait for."""
        self.changes += 1
        self._ring()
        if self._poller is not None:
            self._link.wake()

    def pause(self, seen: int, deadline: float = math.inf) -> None:
        """Until something may have changed since ``changes`` was ``seen``, or the deadline.

        Returns at once where the section before this has sent something, for that may have eaten
        the edge of an answer: the next one looks.
        """
        timeout = self._link.patience
        if self._copies.pending:  # of which no fd tells
            timeout = min(timeout, POLL_SECONDS)
        timeout = min(timeout, max(0.0, deadline - time.monotonic()))
        me = threading.get_ident()
        bell = None
        before = self._poller  # this thread itself, in a signal handler in the middle of its wait
        polls = False
        try:
            with self._lock:
                if self.changes != seen or self._closed or self._link.stirred:
                    return
                if self._poller in (None, me):
                    before, self._poller, polls = self._poller, me, True
                else:
                    bell = self._new_bell()
            if bell is None:
                self._link.wait(timeout)
            else:
                bell.acquire(timeout=timeout)
        except OSError:
            if not self._closed:  # by a signal handler, in the middle of the wait
                raise
        finally:
            if polls:
                self._poller = before
                with self._lock:
                    self._ring()
            elif bell is not None:
                with self._lock, contextlib.suppress(ValueError):  # it was rung
                    self._bells.remove(bell)

    def _new_bell(self) -> threading.Lock:
        """What :meth:`_ring` releases; the caller holds the lock, and waits when it does not."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        return bell

    def _ring(self) -> None:
        """Wake those that sleep; the caller holds the lock."""
        while self._bells:
            self._bells.pop().release()

    def close(self, detach: Callable[[], None]) -> None:
        """Refuse all further calls, and ``detach`` when no thread polls the link any more.

        In a signal handler that has interrupted another call of this thread, it is not detached.
        """
        me = threading.get_ident()
        self._closed = True
        if me in (self._holder, self._poller):
            return
        while True:
            with self._lock:
                self._ring()
                if self._poller is None:
                    detach()
                    return
                self._link.wake()  # its fds must stay open until that thread is off them
                bell = self._new_bell()
            bell.acquire(timeout=1.0)

    def drop(self, what: _Dropped) -> None:
        """For finalizers: ``what`` is taken in now, or by whoever is in a section."""
        self._dropped.append(what)
        self._work_off()

    def _work_off(self) -> None:
        """Take in what was dropped, unless the lock is held: whoever holds it does it then."""
        while self._dropped and not (
            self._lock.locked() or self.forked or self._closed or self._torn
        ):
            with contextlib.suppress(HandleReleased, UsageError):
                self.change(_nothing)


def _nothing() -> None:
    """A section that only takes in what has come, and what was dropped."""
