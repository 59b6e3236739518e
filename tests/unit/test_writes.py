"""The write budget: its window, what is held and refused, whose turn it is, and its record."""

import logging
import math
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from discod import write_record
from discod.chores import Chores
from discod.config import DAY_SECONDS, BadOption, Config, WriteRate, parse_write_rate
from discod.loop import Timer
from discod.window import PARTS, Entry, Window
from discod.write_record import NAME, WriteRecord, boot_id
from discod.writes import CLAIM_SECONDS, Held, Writes

HOUR = 3600.0
MIB = 1 << 20


class Machine:
    """A clock that the test moves, with timers, and writes that are counted."""

    def __init__(self, budget: WriteRate | None) -> None:
        self.now = 1_000_000_000.0
        self.timers: list[tuple[float, Timer]] = []
        self.started: list[tuple[float, str, int]] = []
        self.refused: list[str] = []
        self.saved: list[list[Entry]] = []
        self.writes = Writes(budget, self.call_later, self.saved.append, lambda: self.now)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        self.timers.append((self.now + seconds, timer))
        return timer

    def sleep(self, seconds: float) -> None:
        """Let time pass, timers included."""
        end = self.now + seconds
        while due := [one for one in self.timers if one[1].callback and one[0] <= end]:
            when, timer = min(due, key=lambda one: one[0])
            self.now = max(self.now, when)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        self.now = end

    def write(self, owner: str, size_bytes: int) -> Held | None:
        return self.writes.admit(
            owner,
            size_bytes,
            lambda: self.started.append((self.now, owner, size_bytes)),
            self.refused.append,
        )

    def most_in_any_window(self, seconds: float) -> int:
        """By brute force, over all that was started."""
        return max(
            sum(size for when, _, size in self.started if end - seconds <= when <= end)
            for end, _, _ in self.started
        )


@pytest.mark.parametrize(
    ("text", "size_bytes", "seconds"),
    [
        ("2TB/day", 2 * 10**12, DAY_SECONDS),
        ("1.5 TiB / Day", 3 << 39, DAY_SECONDS),
        ("100GB/hour", 10**11, HOUR),
    ],
)
def test_a_rate_is_read_as_people_write_it(text: str, size_bytes: int, seconds: float) -> None:
    """A budget would be another one than was asked for."""
    assert parse_write_rate(text) == WriteRate(size_bytes, seconds)


@pytest.mark.parametrize(
    "text", ["2TB", "2TB/", "2TB/week", "/day", "much/day", "0/day", "-1GB/day"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    """A slip of the pen would be no budget, and the disk worn out."""
    with pytest.raises(ValueError, match="day"):
        parse_write_rate(text)


def test_a_budget_without_a_unit_is_refused() -> None:
    """``2/day`` would be taken for two bytes, and nothing ever be written."""
    with pytest.raises(BadOption, match="it must be at least"):
        Config((Path("/s"),), Path("/r"), write_budget=WriteRate(2, DAY_SECONDS))


def test_the_window_never_counts_too_little() -> None:
    """More than the budget would be written in some span of its length."""
    now = 0.0
    window = Window(HOUR, lambda: now)
    rng = random.Random(0)
    added: list[tuple[float, int]] = []
    for _ in range(400):
        now += rng.choice([0.0, 1.0, 60.0, 700.0])
        size = rng.randrange(1, 100)
        window.add(size)
        added.append((now, size))
        exact = sum(size for when, size in added if when >= now - HOUR)
        late = HOUR + 2 * HOUR / PARTS
        assert exact <= window.total_bytes <= sum(s for when, s in added if when >= now - late)


def test_the_window_says_when_bytes_will_have_left_it() -> None:
    """A write would be tried too early, without end, or too late."""
    now = 0.0
    window = Window(HOUR, lambda: now)
    for _ in range(3):
        window.add(10)
        now += 600.0
    assert window.seconds_until_gone(31) == math.inf
    for size, most in ((1, HOUR - 1800.0), (10, HOUR - 1800.0), (11, HOUR - 1200.0)):
        seconds = window.seconds_until_gone(size)
        assert most - 10 <= seconds <= most + 10
    now += window.seconds_until_gone(20)
    assert window.total_bytes == 10
    assert window.seconds_until_gone(0) == 0
    window.take_back(4)
    assert window.total_bytes == 6


def test_a_record_that_is_ahead_does_not_close_the_budget_for_long() -> None:
    """A record of another machine, on a disk that was moved, would let nothing be written."""
    now = 1000.0
    window = Window(HOUR, lambda: now)
    window.restore([(10**9, 5), (0.0, 7)])
    assert window.total_bytes == 12
    now += HOUR + HOUR / PARTS
    assert window.total_bytes == 0


def test_without_a_budget_all_is_written_and_counted() -> None:
    """The status would not say how fast a disk wears out."""
    machine = Machine(None)
    assert machine.write("a", 10 * MIB) is None
    machine.now += HOUR
    assert machine.write("b", 2 * MIB) is None
    assert [size for _, _, size in machine.started] == [10 * MIB, 2 * MIB]
    status = machine.writes.status()
    assert status["written_bytes"] == status["written_last_day_bytes"] == 12 * MIB
    assert status["written_bytes_per_day"] == 24 * 12 * MIB
    assert status["write_budget_bytes"] is None
    assert machine.writes.status_of("b")["written_last_day_bytes"] == 2 * MIB
    machine.now += 2 * DAY_SECONDS
    assert machine.writes.status()["written_last_day_bytes"] == 0
    assert machine.saved == []


def test_what_must_wait_long_is_refused_and_says_how_long() -> None:
    """A trainer would stand still for hours, and nobody would know why."""
    machine = Machine(WriteRate(10 * MIB, DAY_SECONDS))
    assert machine.write("a", 8 * MIB) is None
    machine.sleep(6 * HOUR)
    assert machine.write("a", 4 * MIB) is None
    (text,) = machine.refused
    for part in ("10.0 MiB/day", "8.0 MiB were written", "4.0 MiB", "18.0 h", "--write-budget"):
        assert part in text
    machine.sleep(18 * HOUR + DAY_SECONDS / PARTS)
    assert machine.write("a", 4 * MIB) is None
    assert len(machine.started) == 2


def test_more_than_the_whole_budget_is_refused() -> None:
    """A blob that can never be written would wait for ever, or keep the others from the disk."""
    machine = Machine(WriteRate(10 * MIB, HOUR))
    machine.write("b", MIB)
    assert machine.write("a", 11 * MIB) is None
    assert "ever allows" in machine.refused[0]
    assert machine.write("b", 9 * MIB) is None
    assert len(machine.started) == 2


def test_what_is_kept_for_others_is_said_and_not_for_long() -> None:
    """A client would be told that its write never fits; or an idle one keep room for ever."""
    machine = Machine(WriteRate(10 * MIB, HOUR))
    machine.write("a", 2 * MIB)
    machine.write("b", 1 * MIB)
    assert machine.write("b", 10 * MIB) is None
    assert machine.write("a", 8 * MIB) is None
    assert "others, who wrote less, come first" in machine.refused[1]
    machine.sleep(CLAIM_SECONDS)
    assert machine.write("a", 7 * MIB) is None
    assert len(machine.refused) == 2
    assert len(machine.started) == 3


def test_what_must_wait_a_moment_is_held_and_then_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A write would be refused that could have been made a second later; or nobody be told."""
    machine = Machine(WriteRate(10 * MIB, HOUR))
    machine.write("a", 10 * MIB)
    machine.sleep(HOUR - 30)
    with caplog.at_level(logging.INFO, logger="discod"):
        held = [machine.write("a", MIB) for _ in range(3)]
        assert all(held)
        status = machine.writes.status()
        assert (status["write_budget_held"], status["write_budget_held_bytes"]) == (3, 3 * MIB)
        machine.sleep(20)
        status = machine.writes.status()
        assert status["write_budget_short_seconds"] == pytest.approx(20)
        assert len(machine.started) == 1
        machine.sleep(20)
        assert len(machine.started) == 4
        machine.sleep(2 * HOUR)
        machine.write("a", MIB)
    assert machine.writes.status()["write_budget_short_seconds"] == 0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "is used up: writes wait for it" in said[0]
    assert "has room again" in said[1]


def test_a_held_write_can_be_cancelled_and_leaves_its_room() -> None:
    """What was freed meanwhile would be written in vain, and use the budget up."""
    machine = Machine(WriteRate(10 * MIB, HOUR))
    machine.write("a", 10 * MIB)
    machine.sleep(HOUR - 30)
    first, second = machine.write("a", 10 * MIB), machine.write("b", MIB)
    assert first is not None
    assert second is not None
    machine.writes.cancel(first)
    machine.sleep(60)
    assert [owner for _, owner, _ in machine.started] == ["a", "b"]
    machine.writes.undone("b", MIB)
    machine.writes.leave("b")
    assert machine.writes.status()["written_bytes"] == 10 * MIB
    assert machine.write("a", 10 * MIB) is None
    assert machine.refused == []
    assert len(machine.started) == 3


def test_no_window_has_more_than_the_budget() -> None:
    """The cap would be none."""
    budget = WriteRate(200 * MIB, HOUR)
    machine = Machine(budget)
    rng = random.Random(1)
    for _ in range(1000):
        machine.sleep(rng.choice([0, 1, 5, 60]))
        for owner in "abc":
            if not machine.writes.status_of(owner)["writes_held"]:
                machine.write(owner, rng.randrange(1, 20) * MIB)
    assert machine.most_in_any_window(HOUR) <= budget.size_bytes
    whole_hours = (machine.now - machine.started[0][0]) // HOUR
    assert whole_hours >= 3
    assert sum(size for _, _, size in machine.started) >= 0.9 * budget.size_bytes * whole_hours


@pytest.mark.parametrize("size", [1, 20], ids=["held", "refused"])
def test_who_wrote_least_comes_first(size: int) -> None:
    """One that was there first, or asks more often, would keep the budget to itself."""
    machine = Machine(WriteRate(200 * MIB, HOUR))
    for _ in range(220):
        machine.write("first", MIB)
        machine.sleep(18)
    for _ in range(600):
        machine.sleep(6)
        for owner in ("first", "first", "first", "second"):
            if not machine.writes.status_of(owner)["writes_held"]:
                machine.write(owner, (size if owner == "second" else 1) * MIB)
    last_hour = [one for one in machine.started if one[0] > machine.now - HOUR]
    shares = [sum(s for _, name, s in last_hour if name == n) for n in ("first", "second")]
    assert shares[1] >= 0.8 * shares[0]


def test_the_record_is_ahead_of_what_was_written() -> None:
    """A daemon that is killed would leave less on record than is on the disk's account."""
    machine = Machine(WriteRate(512 * MIB, HOUR))
    written = 0
    for size in (1, 3, 2, 1, 9, 2, 2, 4):
        machine.write("a", size * MIB)
        written += size * MIB
        recorded = sum(bytes_ for _, bytes_ in machine.saved[-1])
        assert written <= recorded + 2 * MIB
        assert recorded <= written + 2 * MIB


def test_the_record_outlives_the_process(tmp_path: Path) -> None:
    """A restart would reset the budget."""
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    entries = [(1_000_000_000.0, 7 * MIB), (1_000_000_060.0, 2 * MIB)]
    chores = Chores(lambda callback: callback())
    record = WriteRecord(directories, chores)
    assert record.load() == []
    record.save([])
    record.save_now(entries)
    for directory in directories:
        assert os.listdir(directory) == [NAME]
        assert (directory / NAME).stat().st_mode & 0o777 == 0o600
    (directories[1] / NAME).unlink()
    again = WriteRecord(list(reversed(directories)), chores)
    assert again.load() == entries
    machine = Machine(WriteRate(10 * MIB, HOUR))
    machine.now = 1_000_000_100.0
    machine.writes.restore(again.load())
    machine.write("a", 2 * MIB)
    assert len(machine.refused) == 1


def test_a_record_that_is_being_written_by_a_hung_disk_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would not end, and be killed by its service manager."""
    let_go, hangs = threading.Event(), threading.Event()
    replace = os.replace

    def slow(*args: Path) -> None:
        hangs.set()
        assert let_go.wait(20)
        replace(*args)

    monkeypatch.setattr(write_record.os, "replace", slow)
    monkeypatch.setattr(write_record, "LAST_SECONDS", 0.01)
    chores = Chores(lambda callback: callback())
    record = WriteRecord([tmp_path], chores)
    record.save([(0.0, MIB)])
    record.save([(0.0, 2 * MIB)])
    assert hangs.wait(20)
    record.save_now([(0.0, 3 * MIB)])
    let_go.set()
    chores.stop()
    assert record.load() == [(0.0, MIB)], "what came after its end was still written"


def test_what_was_written_before_the_boot_counts(tmp_path: Path) -> None:
    """A reboot would reset the budget, or keep it used up for ever."""
    record = WriteRecord([tmp_path], Chores(lambda callback: callback()))
    record.save_now([(10**9, 7 * MIB), (10**9 + 60, 2 * MIB)])
    path = tmp_path / NAME
    path.write_text(path.read_text().replace(boot_id(), "another"))
    assert record.load() == [(0.0, 7 * MIB), (0.0, 2 * MIB)]
    machine = Machine(WriteRate(10 * MIB, HOUR))
    machine.now = 60.0
    machine.writes.restore(record.load())
    machine.write("a", 2 * MIB)
    assert len(machine.refused) == 1
    machine.now = HOUR + 10
    machine.write("a", 2 * MIB)
    assert len(machine.refused) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2, "written": []}', '{"version": 1, "written": [[1, -2]]}'],
)
def test_a_record_that_is_none_is_said_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """A torn or foreign file would keep the daemon from starting."""
    (tmp_path / NAME).write_text(text)
    record = WriteRecord([tmp_path], Chores(lambda callback: callback()))
    with caplog.at_level(logging.WARNING, logger="discod"):
        assert record.load() == []
    assert "cannot be used" in caplog.text
