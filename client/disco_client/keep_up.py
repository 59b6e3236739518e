"""Whether the disk keeps up with the trainer, and what to say once when it does not.

Knows no clock and no session: it is told of each cycle what it took.
"""

from dataclasses import dataclass

from discod.wire.sizes import format_size

COLD_CYCLES = 3
"""The first cycles prove nothing: the order is learned, memory is touched, files grow."""

PART = 0.1
"""Of a cycle: less is not worth a line, nor what the next one may do without."""

CYCLES = 3
LEAST_SECONDS = 1.0
"""In a row, and of waiting in all of them: a pause of the machine or of the daemon is neither."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one cycle took.

    Attributes:
        seconds: From the end of the last one to its own.
        save_wait_seconds: Of it, saves waited for room.
        load_wait_seconds: Of it, loads waited for reads.
        busy_seconds: Of it, something was being written or read.
        moved_bytes: Written and read.
        saved_bytes: Saved.
    """

    seconds: float
    save_wait_seconds: float
    load_wait_seconds: float
    busy_seconds: float
    moved_bytes: int
    saved_bytes: int

    @property
    def waited_seconds(self) -> float:
        """For room and for reads."""
        return self.save_wait_seconds + self.load_wait_seconds

    @property
    def measured(self) -> float:
        """Bytes per second that the disk moved while it had anything to do."""
        return self.moved_bytes / self.busy_seconds

    @property
    def needed(self) -> float:
        """Bytes per second that would have moved the same without a wait."""
        least = self.busy_seconds / 100
        return self.moved_bytes / max(self.busy_seconds - self.waited_seconds, least)

    def arena_bytes(self, arena_bytes: int) -> int:
        """The arena that would have made the waits needless.

        What the disk moved while saves waited is what did not fit; and the same for loads. A byte
        more in RAM is one byte less to write and one less to read, so the larger of both counts.
        """
        longer = max(self.save_wait_seconds, self.load_wait_seconds)
        return min(arena_bytes + int(longer * self.measured), max(self.saved_bytes, arena_bytes))


class KeepUp:
    """Watches the cycles of one process.

    Args:
        arena_bytes: Size of its arena.
    """

    def __init__(self, arena_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        self._cycles = 0
        self._in_a_row: list[Cycle] = []
        self._said = False

    def end_cycle(self, cycle: Cycle) -> str | None:
        """A cycle is over; what to say of it and those before, the first time there is anything."""
        self._cycles += 1
        disk = cycle.moved_bytes > 0 and cycle.busy_seconds > 0
        waits = disk and cycle.waited_seconds >= PART * cycle.seconds
        if self._said or self._cycles <= COLD_CYCLES or not waits:
            self._in_a_row.clear()
            return None
        self._in_a_row.append(cycle)
        waited = sum(one.waited_seconds for one in self._in_a_row)
        if len(self._in_a_row) < CYCLES or waited < LEAST_SECONDS:
            return None
        self._said = True
        return self._text(waited)

    def _text(self, waited: float) -> str:
        cycles = self._in_a_row
        part = waited / sum(cycle.seconds for cycle in cycles)
        worst = max(cycles, key=lambda cycle: cycle.arena_bytes(self._arena_bytes))
        return (
            f"the disk does not keep up: in each of the last {len(cycles)} steps this process "
            f"waited for it, {part:.0%} of the time. It needs {worst.needed / 1e9:.2f} GB/s and "
            f"gets {worst.measured / 1e9:.2f} GB/s. An arena of "
            f"{format_size(worst.arena_bytes(self._arena_bytes))} instead of "
            f"{format_size(self._arena_bytes)} would remove the wait (DISCOD_ARENA, "
            "connect(arena=)), as would a faster --scratch, or one more"
        )
