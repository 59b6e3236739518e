"""The session's own rules, over a link that never answers: who is woken, what a cycle is."""

import threading
from typing import Any, cast

import pytest

from disco_client.arena import Arena
from disco_client.link import Link
from disco_client.residency import Group
from disco_client.session import Session
from discod.wire.messages import Trim, Write

MIB = 1 << 20


class Owner:
    """Whoever a blob is saved for."""


class SilentLink:
    """A link to a daemon that takes requests and never answers."""

    files = 1
    patience = 30.0
    stirred = False

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.woken = threading.Event()

    def request(self, make: Any, answer: Any) -> int:
        self.requests.append(make(len(self.requests), 1))
        return len(self.requests)

    def enroll(self, name: object, make: Any, answer: Any) -> bool:
        self.request(make, answer)
        return True

    def withdraw(self, name: object) -> bool:
        return True

    def quiet(self) -> bool:
        return True

    def drain(self) -> bool:
        return False

    def check(self, *, blocked: bool) -> None:
        pass

    def wait(self, timeout: float) -> None:
        self.woken.wait(timeout)
        self.woken.clear()

    def wake(self) -> None:
        self.woken.set()


@pytest.fixture
def session() -> Session:
    return Session(Arena(2 * MIB), cast(Link, SilentLink()))


def test_a_save_that_ends_wakes_the_load_that_waits_for_it(session: Session) -> None:
    """Else a thread that loads what another one is copying sleeps for the link's patience."""
    copying, copied = threading.Event(), threading.Event()

    def copy_in(slot: int, memory: memoryview) -> None:
        copying.set()
        assert copied.wait(10)

    owner = Owner()
    saver = threading.Thread(target=lambda: session.save(MIB, copy_in, Group(), owner))
    saver.start()
    assert copying.wait(10)
    loader = threading.Thread(target=lambda: session.load(0, MIB))
    loader.start()
    while not session._monitor._poller:
        assert loader.is_alive()
    copied.set()
    loader.join(10)
    saver.join(10)
    assert not loader.is_alive()


def test_a_loan_that_outlives_its_blob_ends_no_second_cycle(session: Session) -> None:
    """Else the waits of the last cycle are reported as zero."""
    owner = Owner()
    blob, end = session.save(MIB, lambda slot, memory: None, Group(), owner)
    view, _ = session.load(blob, MIB)
    session._waits.load_seconds = 3.0
    end()
    assert session.stats().last_cycle.load_wait_seconds == 3.0
    del view
    stats = session.stats()
    assert stats.last_cycle.load_wait_seconds == 3.0
    assert stats.live_blobs == 0


def test_a_copy_that_fails_leaves_nothing(session: Session) -> None:
    """The caller's error comes through, and the slot is free again."""

    def fail(slot: int, memory: memoryview) -> None:
        raise ValueError("the copy's own error")

    for _ in range(4):
        with pytest.raises(ValueError, match="the copy's own error"):
            session.save(2 * MIB, fail, Group(), Owner())
    assert session.stats().live_blobs == 0
    assert session.stats().saved_bytes == 0


def test_the_trim_of_an_idle_job_is_down_to_nothing(session: Session) -> None:
    """Else it keeps the disk that its last writes were still going to when it freed the blobs."""
    owners = [Owner() for _ in range(2)]
    ends = [session.save(MIB, lambda slot, memory: None, Group(), owner)[1] for owner in owners]
    link = cast(SilentLink, session.link)
    assert any(isinstance(request, Write) for request in link.requests), "nothing is in flight"
    for end in ends:
        end()
    session.stats()
    assert isinstance(link.requests[-1], Trim)
    assert link.requests[-1].size == 0
