"""What a session tells the daemon of itself: when, and that the numbers are right."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_client import reporter as reporter_module
from disco_client import waits as waits_module
from disco_client.link import Link
from disco_client.reporter import CYCLE_SECONDS, REPORT_SECONDS, Reporter
from disco_client.residency import Residency
from disco_client.waits import Waits
from discod.client_report import WaitSpan, spans_of
from discod.wire.messages import MAX_REPORT_SPANS, Done, Report, WaitFor

MIB = 1 << 20


class Clock:
    """Seconds, as the test sets them."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class HeldLink:
    """A link whose requests are made and answered when the test says so."""

    def __init__(self) -> None:
        self.makes: list[Any] = []
        self.answers: list[Any] = []

    def request(self, make: Any, answer: Any) -> int:
        self.makes.append(make)
        self.answers.append(answer)
        return len(self.makes)

    def answer(self) -> None:
        self.answers.pop()(Done(0, 1, b""))

    def sent(self) -> Report:
        report = self.makes[-1](0, 1)
        assert isinstance(report, Report)
        return report


class Rig:
    """A reporter with what it is made of."""

    def __init__(self) -> None:
        self.link = HeldLink()
        self.residency = Residency(4 * MIB, 1)
        self.waits = Waits()
        self.reporter = Reporter(cast(Link, self.link), self.residency, self.waits)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (reporter_module, waits_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def rig(clock: Clock) -> Rig:
    return Rig()


def test_a_report_a_second(rig: Rig, clock: Clock) -> None:
    """Each save would send a message more; or a long step would not be seen until its end."""
    for _ in range(1000):
        rig.reporter.look()
    assert rig.link.makes == []
    for second in range(1, 4):
        clock.now += REPORT_SECONDS
        for _ in range(10):
            rig.reporter.look()
        assert len(rig.link.makes) == second
        rig.link.answer()


def test_the_first_cycle_is_told_and_not_each_of_many(rig: Rig, clock: Clock) -> None:
    """One step would not be seen; or a loop of tiny ones would do little else than report."""
    for _ in range(100):
        rig.reporter.end_cycle()
        clock.now += CYCLE_SECONDS / 10
    rig.link.answer()
    assert len(rig.link.makes) == 1
    rig.reporter.end_cycle()
    assert len(rig.link.makes) == 2


def test_one_unanswered_at_a_time(rig: Rig, clock: Clock) -> None:
    """A daemon that is away for a night would be sent ten thousand reports when it is back."""
    for _ in range(50):
        clock.now += REPORT_SECONDS
        rig.reporter.look()
    assert len(rig.link.makes) == 1
    rig.link.answer()
    clock.now += REPORT_SECONDS
    rig.reporter.look()
    assert len(rig.link.makes) == 2


def test_numbers_are_those_of_the_moment(rig: Rig, clock: Clock) -> None:
    """One that is sent again to the next daemon would be old, and a wait that goes on unseen."""
    clock.now += REPORT_SECONDS
    wait = rig.waits.begin()
    wait.begin(WaitFor.READ)
    rig.reporter.look()
    clock.now += 5
    again = rig.link.sent()
    assert (again.read_waits, again.read_wait_ns) == (1, 5 * 10**9)
    assert again.spans == ()
    rig.waits.end_load(wait)
    clock.now += 5
    ended = rig.link.sent()
    assert (ended.read_waits, ended.read_wait_ns, ended.room_waits) == (1, 5 * 10**9, 0)


def test_spans_are_told_once_and_the_rest_is_counted(rig: Rig, clock: Clock) -> None:
    """A trace would show waits twice, or a report be too large to send."""
    many = MAX_REPORT_SPANS + 10
    for _ in range(many):
        wait = rig.waits.begin()
        wait.begin(WaitFor.ROOM)
        wait.begin(WaitFor.DEVICE)  # it is the first that counts
        clock.now += 1
        rig.waits.end_save(wait)
    rig.waits.end_save(rig.waits.begin())  # one that never waits
    rig.reporter.look()
    report = rig.link.sent()
    assert (report.room_waits, report.room_wait_ns) == (many, many * 10**9)
    assert (report.device_waits, report.device_wait_ns) == (0, 0)
    spans = spans_of(report)
    first = 1010 * 10**9
    assert spans[0] == WaitSpan(WaitFor.ROOM, first, first + 10**9)
    assert len(spans) == MAX_REPORT_SPANS
    rig.link.answer()
    clock.now += REPORT_SECONDS
    rig.reporter.look()
    assert rig.link.sent().spans == ()


def test_a_total_never_falls(rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Monitoring would take it for a client that began anew, and count all of it twice."""
    elided = [5 * MIB, 4 * MIB, 6 * MIB]
    found = []
    for amount in elided:
        totals = SimpleNamespace(saved_bytes=8 * MIB, elided_bytes=amount)
        monkeypatch.setattr(Residency, "totals", totals)
        clock.now += REPORT_SECONDS
        rig.reporter.look()
        found.append(rig.link.sent().elided_bytes)
        rig.link.answer()
    assert found == [5 * MIB, 5 * MIB, 6 * MIB]


def test_loads_are_counted(rig: Rig, clock: Clock) -> None:
    """Nobody could say what part of the loads waited."""
    for _ in range(3):
        rig.reporter.loaded()
    clock.now += REPORT_SECONDS
    rig.reporter.look()
    assert rig.link.sent().loads == 3
