"""When idle files are trimmed, with a clock that stands still."""

from collections.abc import Callable
from typing import Any

import pytest

from discod import trimming
from discod.tenant import File
from discod.trimming import IDLE_SECONDS, Trimmer


class World:
    """Loop, chores, clock and scratch file in one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.trimmed: list[tuple[float, int]] = []
        monkeypatch.setattr(trimming.time, "monotonic", lambda: self.now)
        self.trimmer = Trimmer(self, self)  # type: ignore[arg-type]  # it has what is used
        self.file = File(self, self, 0)  # type: ignore[arg-type]  # it has what is used

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, callback))

    def submit(self, function: Callable[[], Any], outcome: Callable[[Any], None]) -> None:
        outcome(function())

    def keep(self) -> int:
        return 7

    def trim(self, size_bytes: int, version: int) -> None:
        assert version == 7
        self.trimmed.append((self.now, size_bytes))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and min(self.timers, key=lambda timer: timer[0])[0] <= end:
            timer = min(self.timers, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1]()
        self.now = end

    def use(self) -> None:
        """A read begins and ends now."""
        self.file.idle_since = self.now
        if self.file.trim_bytes is not None:
            self.trimmer.idle(self.file)

    def ask(self, size_bytes: int) -> None:
        self.file.trim_bytes = size_bytes
        self.trimmer.idle(self.file)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_after_idleness(world: World) -> None:
    """An idle job would hold the disk, or be trimmed again and again."""
    world.ask(4096)
    world.pass_time(60)
    assert world.trimmed == [(100 + IDLE_SECONDS, 4096)]
    assert world.timers == []


def test_use_puts_it_off(world: World) -> None:
    """A job that trains steadily would lose its extents in the middle of a step."""
    world.ask(4096)
    for _ in range(10):
        world.pass_time(IDLE_SECONDS * 0.7)
        world.use()
    assert world.trimmed == []
    assert len(world.timers) == 1, "a timer for each request"
    last = world.now
    world.pass_time(60)
    assert world.trimmed == [(last + IDLE_SECONDS, 4096)]


def test_not_while_busy(world: World) -> None:
    """A file would be cut while requests on it run."""
    world.ask(4096)
    world.file.busy = 1
    world.pass_time(60)
    assert world.trimmed == []
    world.file.busy = 0
    world.use()
    world.pass_time(60)
    assert len(world.trimmed) == 1


def test_not_after_a_write(world: World) -> None:
    """What was written since would be cut off."""
    world.ask(4096)
    world.file.trim_bytes = None
    world.pass_time(60)
    assert world.trimmed == []


def test_the_last_word_counts(world: World) -> None:
    """It would be trimmed to a size that is in use again, or not far enough."""
    world.ask(8192)
    world.pass_time(1)
    world.ask(4096)
    world.pass_time(60)
    assert [size for _, size in world.trimmed] == [4096]
