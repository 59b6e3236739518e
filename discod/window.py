"""How many bytes went by in the last hours: a sliding window over time."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

PARTS = 1440
"""Of a window: a minute of a day. Bytes leave with their part, so late by one part at most."""

Entry = tuple[float, int]
"""A moment, in seconds since the boot, and the bytes of the part of the window that began then."""


def since_boot() -> float:
    """Seconds since the machine was started, also while it slept.

    No clock that somebody can set: a jump would empty a window, or keep it full for hours.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Window:
    """Counts bytes of the last ``seconds``, and of up to a 1440th part more: never too few.

    Args:
        seconds: Its length.
        clock: Seconds since the boot, which outlive the process.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = since_boot) -> None:
        self.seconds = seconds
        self._part_seconds = seconds / PARTS
        self._clock = clock
        self._entries: deque[Entry] = deque()
        self._total = 0

    @property
    def total_bytes(self) -> int:
        """What is in it now."""
        now = self._clock()
        while self._entries and self._end(self._entries[0]) <= now:
            self._total -= self._entries.popleft()[1]
        return self._total

    def add(self, size_bytes: int, now: float | None = None) -> None:
        """So many bytes go by now, which is what the clock says if it is not given."""
        self._add(self._clock() if now is None else now, size_bytes)

    def take_back(self, size_bytes: int) -> None:
        """So many of the bytes that were added last have not gone by after all."""
        while size_bytes and self._entries:
            start, part_bytes = self._entries.pop()
            taken = min(part_bytes, size_bytes)
            size_bytes -= taken
            self._total -= taken
            if part_bytes > taken:
                self._entries.append((start, part_bytes - taken))

    def seconds_until_gone(self, size_bytes: int) -> float:
        """When so many bytes will have left it; infinite when there are not so many in it."""
        now = self._clock()
        gone = 0
        for entry in self._entries:
            if gone >= size_bytes:
                break
            gone += entry[1]
            left_at = self._end(entry)
        else:
            if gone < size_bytes:
                return math.inf
        return max(0.0, left_at - now) if size_bytes > 0 else 0.0

    def entries(self) -> list[Entry]:
        """What is in it, for :meth:`restore`."""
        return list(self._entries)

    def restore(self, entries: Sequence[Entry]) -> None:
        """Count what another process has noted, whatever its window was."""
        now = self._clock()
        for start, size_bytes in sorted(entries):
            # Should a record be ahead: it stays in the window as long as what is added now.
            self._add(min(start, now), size_bytes)

    def _add(self, when: float, size_bytes: int) -> None:
        if not self._entries or when >= self._entries[-1][0] + self._part_seconds:
            start = when // self._part_seconds * self._part_seconds
            self._entries.append((start, size_bytes))
        else:
            start, part_bytes = self._entries[-1]
            self._entries[-1] = start, part_bytes + size_bytes
        self._total += size_bytes

    def _end(self, entry: Entry) -> float:
        return entry[0] + self._part_seconds + self.seconds
