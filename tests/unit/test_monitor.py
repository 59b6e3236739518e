"""The lock of a session, interrupted at every moment at which Python would run a signal handler."""

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import pytest

from disco_client.link import Link
from disco_client.monitor import Monitor
from tests.helpers.daemon import eventually

MOMENTS = 200
"""More than there are in a wait."""


class QuietLink:
    """A link that never has anything, and whose waits end at once or when it is woken."""

    patience = 30.0
    stirred = False

    def __init__(self) -> None:
        self._wake_fd = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def quiet(self) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        select.select([self._wake_fd], [], [], timeout)

    def sleep(self) -> None:
        """From now on a wait lasts until :meth:`wake`."""
        os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        os.close(self._wake_fd)


class NoCopies:
    pending = False

    def settle(self) -> bool:
        return False


@pytest.fixture
def link() -> Iterator[QuietLink]:
    link = QuietLink()
    yield link
    link.close()


@pytest.fixture
def monitor(link: QuietLink) -> Monitor[int]:
    return Monitor(cast(Link, link), lambda what: None, NoCopies())


def interrupted(call: Callable[[], object], moment: int) -> bool:
    """Whether ``call`` got as far as this: a signal handler raises at its n-th moment.

    Python looks for signals where a function begins, and where a call of a C function has ended.
    """
    left = moment

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def moments(call: Callable[[], object]) -> Iterator[int]:
    """Interrupt ``call`` at each of its moments; after each, this yields it."""
    for moment in range(MOMENTS):
        if not interrupted(call, moment):
            assert moment > 5, "it was hardly interrupted"
            return
        yield moment
    raise AssertionError("it has no end")


def test_no_poller_stays_behind(monitor: Monitor[int]) -> None:
    """Other threads would sleep for one that is gone, and close() wait for it for ever."""
    for moment in moments(lambda: monitor.pause(0)):
        assert monitor._poller is None, moment
        assert not monitor._lock.locked(), moment
    closed: list[int] = []
    thread = threading.Thread(target=monitor.close, args=(lambda: closed.append(1),), daemon=True)
    thread.start()
    thread.join(5)
    assert closed


def test_a_sleeper_that_is_interrupted(monitor: Monitor[int], link: QuietLink) -> None:
    """It would take the lock to wake up, and let go of what another thread holds by then."""
    link.sleep()
    poller = threading.Thread(target=monitor.pause, args=(0,))
    poller.start()
    eventually(lambda: monitor._poller is not None)
    for moment in moments(lambda: monitor.pause(0, 0.0)):  # it sleeps, since the other one polls
        assert monitor._poller == poller.ident, moment
        assert not monitor._lock.locked(), moment
        assert len(monitor._bells) <= moment + 1
    with monitor._lock:
        monitor.tell_waiters()
        assert not monitor._bells
    poller.join(5)
    assert not poller.is_alive()
    assert monitor._poller is None


def test_a_wait_inside_of_a_wait(monitor: Monitor[int], link: QuietLink) -> None:
    """A signal handler that loads: the call that it has interrupted would not be seen to poll."""
    seen: list[int | None] = []

    def handler(timeout: float) -> None:
        link.wait = lambda timeout: None  # type: ignore[method-assign]
        monitor.pause(0)
        seen.append(monitor._poller)

    link.wait = handler  # type: ignore[method-assign]
    monitor.pause(0)
    assert seen == [threading.get_ident()]
    assert monitor._poller is None


def test_sleepers_are_woken_by_the_end_of_the_wait(monitor: Monitor[int], link: QuietLink) -> None:
    """Nobody would poll while all sleep, for as long as the link's patience."""
    link.sleep()
    threads = [threading.Thread(target=monitor.pause, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(monitor._bells) == 3)
    link.wake()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert not monitor._bells
