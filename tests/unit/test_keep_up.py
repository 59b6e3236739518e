"""The line that says that the disk does not keep up: when, once, and whether its advice is good."""

import dataclasses
import logging
import re

import pytest

from disco_client import pace as pace_module
from disco_client.instructions import Counters
from disco_client.keep_up import COLD_CYCLES, CYCLES, Cycle, KeepUp
from disco_client.pace import Pace
from disco_client.residency import Residency
from disco_client.waits import Waits
from discod.wire.messages import WaitFor
from tests.simulation.disk import Rates
from tests.simulation.machine import Outcome, play
from tests.simulation.traces import Trace, pipeline, plain

GIB = 1 << 30

SLOW = Cycle(
    seconds=10.0,
    save_wait_seconds=2.0,
    load_wait_seconds=1.0,
    busy_seconds=9.0,
    moved_bytes=9 * 10**9,
    saved_bytes=8 * 10**9,
)
FAST = dataclasses.replace(SLOW, save_wait_seconds=0.5, load_wait_seconds=0.0)


def said(cycles: list[Cycle]) -> list[int]:
    """In which of the cycles something is said."""
    watch = KeepUp(GIB)
    return [n for n, cycle in enumerate(cycles) if watch.end_cycle(cycle) is not None]


def test_it_is_said_once_and_not_of_the_first_cycles() -> None:
    """Each job would begin with a false alarm, or a slow one end with a log full of it."""
    assert said([SLOW] * 20) == [COLD_CYCLES + CYCLES - 1]


@pytest.mark.parametrize(
    "cycle",
    [
        pytest.param(FAST, id="waits little"),
        pytest.param(dataclasses.replace(SLOW, moved_bytes=0), id="moves nothing"),
        pytest.param(
            dataclasses.replace(
                SLOW, seconds=0.01, save_wait_seconds=0.002, load_wait_seconds=0.001
            ),
            id="waits for moments",
        ),
    ],
)
def test_it_is_not_said_of_runs_that_are_well(cycle: Cycle) -> None:
    """A normal run would print a warning."""
    assert said([cycle] * 20) == []


def test_a_hiccup_is_no_slow_disk() -> None:
    """A restart of the daemon would be taken for a disk that cannot keep up."""
    assert said([FAST, *[SLOW] * (CYCLES - 1)] * 10) == []


def test_the_numbers_are_those_of_the_disk() -> None:
    """The user would buy another disk, or an arena, by figures that are wrong."""
    watch = KeepUp(GIB)
    texts = [watch.end_cycle(SLOW) for _ in range(COLD_CYCLES + CYCLES)]
    text = texts[-1]
    assert text is not None
    for part in ("30% of the time", "needs 1.50 GB/s and gets 1.00 GB/s", "2.9 GiB instead of 1.0"):
        assert part in text
    assert SLOW.arena_bytes(7 * 10**9) == 8 * 10**9, "more than all that is saved helps no one"


def cycle_of(outcome: Outcome, rates: Rates, saved_bytes: int) -> Cycle:
    """What a session would measure."""
    busy = outcome.written_bytes / rates.write + outcome.read_bytes / rates.read
    return Cycle(
        seconds=outcome.computed_seconds + outcome.waited_seconds,
        save_wait_seconds=outcome.save_wait_seconds,
        load_wait_seconds=outcome.load_wait_seconds,
        busy_seconds=busy,
        moved_bytes=outcome.written_bytes + outcome.read_bytes,
        saved_bytes=saved_bytes,
    )


@pytest.mark.parametrize("trace", [plain(cycles=3), pipeline(2, layers=8)], ids=["plain", "1F1B"])
@pytest.mark.parametrize("gigabytes", [0.6, 0.9])
def test_the_arena_that_is_named_removes_the_wait(trace: Trace, gigabytes: float) -> None:
    """The user would give memory away, and wait as before.

    Not to the last moment: the pieces that are under way when the wait begins, of up to 16 MiB,
    count too.
    """
    rates = Rates(gigabytes * 1e9, gigabytes * 1e9)
    before = play(trace, Residency(trace.capacity_bytes, files=1), rates)[-1]
    saved_bytes = sum(getattr(step, "size_bytes", 0) for step in trace.cycles[-1])
    cycle = cycle_of(before, rates, saved_bytes)
    assert cycle.waited_seconds > 0.05 * cycle.seconds
    larger = cycle.arena_bytes(trace.capacity_bytes) // (1 << 20) * (1 << 20)
    assert trace.capacity_bytes < larger <= saved_bytes
    after = play(trace, Residency(larger, files=1), rates)[-1]
    assert after.waited_seconds < 0.25 * before.waited_seconds


def test_a_session_says_it_once_for_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line would come again with each attach, or never."""
    monkeypatch.setattr(pace_module, "_said", False)
    now = 100.0
    monkeypatch.setattr("disco_client.pace.time.monotonic", lambda: now)

    class Transfers:
        busy_seconds = 0.0

    with caplog.at_level(logging.WARNING, logger="disco_client"):
        for _ in range(2):
            transfers, waits, pace = Transfers(), Waits(), Pace(GIB)
            for _ in range(10):
                now += 10.0
                transfers.busy_seconds += 9.0
                waits.save_seconds += 3.0
                waits.end_cycle()
                pace.end_cycle(Counters(written_bytes=4 * 10**9), waits, transfers)
    assert len(caplog.records) == 1
    assert re.search(r"30% of the time\. It needs \d\.\d\d GB/s and gets 0\.44 GB/s", caplog.text)


def test_what_a_device_makes_a_save_wait_for_is_not_the_disk() -> None:
    """A GPU that is slow to copy would be taken for a slow disk."""
    waits = Waits()
    for what in (WaitFor.DEVICE, WaitFor.ROOM):
        wait = waits.begin()
        wait.begin(what)
        waits.end_save(wait)
    assert 0 < waits.device_seconds < waits.save_seconds
