"""A small event loop: fds, timers, and callbacks posted from other threads. It never polls."""

import heapq
import itertools
import os
import select
import time
from collections import deque
from collections.abc import Callable

POSTED_PER_ROUND = 1000
"""Then messages and connections have their turn: one client's end can post tens of thousands."""

Callback = Callable[[], None]


class Timer:
    """One callback in the future."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Make it not happen; harmless afterwards."""
        self.callback = None


class Loop:
    """Runs callbacks in the thread that calls :meth:`run`; only :meth:`post` is for others."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._posted: deque[Callback] = deque()
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopped = False
        # By its edge: what wakes the loop is the write, and nobody need read it.
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)

    def add_reader(self, fd: int, callback: Callback) -> None:
        """Call ``callback`` whenever ``fd`` is readable or closed by its peer."""
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        """Undo :meth:`add_reader`; before ``fd`` is closed."""
        del self._readers[fd]
        self._epoll.unregister(fd)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        """Call ``callback`` once, ``seconds`` from now."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def post(self, *callbacks: Callback) -> None:
        """Have the loop call ``callbacks`` soon, in this order. From any thread."""
        self._posted.extend(callbacks)
        if self._asleep:
            self._asleep = False  # whoever posts next need not wake it as well
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Make :meth:`run` return after the present round."""
        self._stopped = True

    def run(self, more: Callable[[], bool]) -> None:
        """Run until :meth:`stop`.

        Args:
            more: Called in every round before it sleeps: for work whose fd does not tell of it.
                While it returns True the loop goes on without sleeping.
        """
        while True:
            busy = more()
            if self._stopped:
                return
            ready = self._epoll.poll(0) if busy else self._sleep()
            # An fd may be closed, and its number be another's, before its turn comes.
            for fd, callback in [(fd, self._readers.get(fd)) for fd, _ in ready]:
                if callback is not None and self._readers.get(fd) is callback:
                    callback()
            for _ in range(min(len(self._posted), POSTED_PER_ROUND)):
                self._posted.popleft()()
            self._run_timers()

    def close(self) -> None:
        """Close the loop's own fds; nothing may be posted any more."""
        self._epoll.close()
        os.close(self._wake_fd)

    def _sleep(self) -> list[tuple[int, int]]:
        """Until an fd is ready, a timer is due, or a callback is there.

        Why no callback is overslept: a thread adds it and then looks at ``_asleep``; the loop sets
        ``_asleep`` and then looks for callbacks. So at least one of them sees the other.
        """
        self._asleep = True
        try:
            return self._epoll.poll(0 if self._posted else self._sleep_seconds())
        finally:
            self._asleep = False

    def _sleep_seconds(self) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
