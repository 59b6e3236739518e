"""The chaos test's own parts: what it draws, and whether what it measures can fail."""

import os
from pathlib import Path

import pytest

from tests.chaos.invariants import GROWTH_BYTES, Broken, growth
from tests.chaos.plan import ERRORS, HARMLESS_TO_A_JOB, WEIGHTS, Kind, draw
from tests.chaos.processes import holdings, nameless_files


def test_a_seed_is_replayed() -> None:
    """A failing run could not be repeated if a seed gave other actions the next time."""
    kinds = list(Kind)
    assert [draw(7, n, kinds) for n in range(50)] == [draw(7, n, kinds) for n in range(50)]
    assert [draw(7, n, kinds) for n in range(50)] != [draw(8, n, kinds) for n in range(50)]


def test_every_action_is_drawn_and_no_other() -> None:
    """An action without a weight, or that is never drawn, would test nothing."""
    assert set(WEIGHTS) == set(Kind)
    drawn = {action.kind for n in range(400) for action in draw(1, n, list(Kind))}
    assert drawn == set(Kind)
    few = [Kind.KILL_DAEMON, Kind.FILL]
    assert {action.kind for n in range(50) for action in draw(1, n, few)} == set(few)


def test_a_process_group_suffers_no_errors() -> None:
    """One rank of a process group that repeats its step alone would hang the others."""
    assert set(ERRORS).isdisjoint(HARMLESS_TO_A_JOB)
    assert set(ERRORS) | HARMLESS_TO_A_JOB == set(Kind)


def test_memory_that_grows_is_found() -> None:
    """A leak of a page in every round of a long run, or of much in a short one, would pass."""
    flat = [(n, 50_000_000 + 4096 * (n % 7)) for n in range(2000)]
    assert abs(growth("flat", flat)) < 100
    leaking = [(n, 50_000_000 + n * 2 * GROWTH_BYTES // 2000) for n in range(2000)]
    with pytest.raises(Broken, match="leaking grew"):
        growth("leaking", leaking)


def test_what_a_process_holds_is_seen(tmp_path: Path) -> None:
    """A nameless file or an arena that stays open would not be counted."""
    pid = os.getpid()
    before, files_before = holdings(pid), nameless_files(pid)
    file = os.open(tmp_path, os.O_RDWR | os.O_TMPFILE, 0o600)
    arena = os.memfd_create("discod-arena")
    try:
        os.posix_fallocate(file, 0, 1 << 20)
        now = holdings(pid)
        assert now.fds - before.fds == {"nameless file": 1, "arena": 1}
        status = os.fstat(file)
        new = {(status.st_dev, status.st_ino): 1 << 20}
        assert nameless_files(pid) == files_before | new
    finally:
        os.close(file)
        os.close(arena)
    assert holdings(pid).fds == before.fds
