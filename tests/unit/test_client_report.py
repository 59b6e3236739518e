"""What is kept of clients' reports: shares of time, and totals of ranks that never fall."""

import math
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from discod.client_report import TOTALS, Told
from discod.ranks import MOST_RANKS, NO_RANK, OTHERS, Ranks
from discod.tenant import Tenant, Who
from discod.traffic import RATE_SECONDS, Rate, Traffic
from discod.wire.messages import Report, WaitFor

SECOND = 10**9
MOST = (1 << 63) - 1


def report(**totals: int) -> Report:
    """A report with these totals, the others 0."""
    return Report(seq=1, epoch=1, **{name: totals.get(name, 0) for name in TOTALS}, spans=())


def client(rank: int, *, written: int = 0, resumed: bool = False) -> Any:
    """What is asked of a tenant."""
    traffic = Traffic()
    traffic.written.add(written, 0.0)
    told = Told(0.0)
    told.resumed = resumed
    return SimpleNamespace(who=Who(os.getpid(), 0, rank), traffic=traffic, told=told)


class TestRate:
    def test_steady_traffic_is_its_own_rate(self) -> None:
        """People would see a disk that is faster or slower than it is."""
        rate = Rate()
        for tick in range(1000):
            rate.add(100.0, tick / 10)
        assert rate.per_second(99.9) == pytest.approx(1000.0, rel=0.03)

    def test_it_falls_when_nothing_comes(self) -> None:
        """A client that has ended its step would be shown to write for ever."""
        rate = Rate()
        assert rate.per_second(5.0) == 0.0
        rate.add(RATE_SECONDS, 0.0)
        assert rate.per_second(0.0) == 1.0
        assert rate.per_second(RATE_SECONDS) == pytest.approx(1 / math.e)
        assert rate.per_second(1e9) == 0.0

    def test_a_clock_that_was_read_earlier(self) -> None:
        """Another one may have been added since: no overflow, and nothing negative."""
        rate = Rate()
        rate.add(1.0, 1e9)
        assert rate.per_second(0.0) == 1.0 / RATE_SECONDS


class TestTold:
    def test_a_wait_that_goes_on_shows(self) -> None:
        """A trainer that stands still for its disk would look like one that computes."""
        told = Told(0.0)
        for second in range(1, 31):
            told.take(report(read_waits=1, read_wait_ns=second * SECOND), float(second))
        assert told.share(WaitFor.READ, 30.0) > 0.9
        assert told.share(WaitFor.ROOM, 30.0) == 0.0
        assert told.share(WaitFor.READ, 60.0) < 0.001

    def test_no_share_is_above_one_whatever_is_said(self) -> None:
        """A client that tells nonsense would break the columns, or a scraper's arithmetic."""
        told = Told(0.0)
        for second, spent in enumerate([MOST, 0, MOST, 5, MOST], start=1):
            told.take(report(room_wait_ns=spent), float(second))
            assert 0.0 <= told.share(WaitFor.ROOM, float(second)) <= 1.0

    def test_what_was_before_a_resume_counts_for_the_past(self) -> None:
        """All that a client ever did would count once more for each restart of the daemon."""
        told = Told(0.0)
        told.resumed = True
        told.take(report(saved_bytes=1000, read_wait_ns=9 * SECOND), 1.0)
        assert told.here("saved_bytes") == 0
        assert told.share(WaitFor.READ, 1.0) == 0.0
        told.take(report(saved_bytes=1300), 2.0)
        assert told.here("saved_bytes") == 300
        assert told.report.saved_bytes == 1300
        told.take(report(saved_bytes=1), 3.0)
        assert told.here("saved_bytes") == 0


class TestRanks:
    def test_totals_outlive_the_clients(self) -> None:
        """They would fall when a trainer ends, and monitoring count the rest once more."""
        ranks = Ranks()
        first, second, other = client(0, written=10), client(0, written=5), client(-1, written=1)
        cast(Told, first.told).take(report(cycles=3), 1.0)
        living = [first, second, other]
        assert ranks.totals(cast(list[Tenant], living))["0"]["written_bytes"] == 15
        for gone in (first, second):
            ranks.leave(gone)
            living.remove(gone)
            totals = ranks.totals(cast(list[Tenant], living))
            assert totals["0"]["written_bytes"] == 15
            assert totals["0"]["cycles"] == 3
        assert totals[NO_RANK]["written_bytes"] == 1

    def test_there_are_so_many_and_no_more(self) -> None:
        """A client that says another rank each time would fill Prometheus, and the daemon."""
        ranks = Ranks()
        for rank in range(2 * MOST_RANKS):
            ranks.leave(client(rank, written=1))
        totals = ranks.totals([])
        assert len(totals) == MOST_RANKS + 1
        assert totals[OTHERS]["written_bytes"] == MOST_RANKS
        assert ranks.name(5) == "5"
        assert ranks.name(MOST) == OTHERS
