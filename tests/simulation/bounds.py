"""What no policy can do better, whatever it knows: bytes written, bytes read, seconds waited.

Why these are bounds
--------------------
A policy may know the future, but has to keep what has a handle: from its save until it is freed a
blob is in the arena or on disk, and at each of its uses in the arena. So at a save or load at which
the living blobs exceed the arena by d bytes, d bytes of those that are not in use are on disk, and:

* *Written:* these bytes were written. Blobs may be split here, and be on disk for free once they
  were written, so what must be written at least is a covering problem: choose bytes of blobs so
  that each moment's excess is covered by chosen bytes of those that can be away at that moment. A
  blob can be away from after its save until it is freed, which is one interval. With intervals,
  choosing those that end last, from the first moment to the last, is optimal.
* *Read:* these bytes are read later, each time anew, but for those of blobs that have no use any
  more. Here the intervals are the gaps between two uses of a blob, and all else is the same.
* *Waited:* by the moment t with excess d, d bytes had been written since the first save; and d
  bytes, less those of blobs without a use to come, are read before the last load. So that begins
  no sooner than max(t as computed, first save + d / write rate) + max(rest as computed, d / read
  rate).

All three hold with whole blobs and with an arena in pieces, where the least can only be more.
:func:`least_by_search` finds the true least for a few blobs, by trying everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.simulation.disk import Rates
from tests.simulation.traces import Compute, Cycle, Free, Load, Save


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least there is."""

    written_bytes: int
    read_bytes: int
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class _Use:
    """A save or load: which blob, and when, with a disk that never lets anyone wait."""

    blob: int
    seconds: float


class _Uses:
    """The saves and loads of some steps, of blobs that are saved in them."""

    def __init__(self, steps: Sequence[object]) -> None:
        self.all: list[_Use] = []
        self.sizes: dict[int, int] = {}
        self.of: dict[int, list[int]] = {}
        """Positions of each blob's uses."""
        self.ends: dict[int, int] = {}
        """Position of the first use after each blob's end."""
        seconds = 0.0
        for step in steps:
            match step:
                case Compute(more):
                    seconds += more
                case Save(blob, size_bytes):
                    self.sizes[blob] = size_bytes
                    self.of[blob] = [len(self.all)]
                    self.all.append(_Use(blob, seconds))
                case Load(blob) if blob in self.of:
                    self.of[blob].append(len(self.all))
                    self.all.append(_Use(blob, seconds))
                case Free(blob):
                    self.ends[blob] = len(self.all)
                case _:
                    pass

    def excess(self, capacity_bytes: int) -> list[int]:
        """By position: bytes that cannot be in the arena then."""
        excess = [-capacity_bytes] * len(self.all)
        for first, end, size_bytes in self.lives():
            for position in range(first, end):
                excess[position] += size_bytes
        return [max(0, size_bytes) for size_bytes in excess]

    def useless(self) -> list[int]:
        """By position: bytes of living blobs that have no use from there on."""
        useless = [0] * len(self.all)
        for blob, uses in self.of.items():
            for position in range(uses[-1] + 1, self.ends.get(blob, len(self.all))):
                useless[position] += self.sizes[blob]
        return useless

    def lives(self) -> list[tuple[int, int, int]]:
        """Of each blob: its save, the first use after its end, its bytes."""
        return [
            (uses[0], self.ends.get(blob, len(self.all)), self.sizes[blob])
            for blob, uses in self.of.items()
        ]

    def absences(self) -> list[tuple[int, int, int]]:
        """As :meth:`lives`, without a last use before the end: it is in the arena for that."""
        return [
            (first, uses[-1] if uses[-1] == end - 1 else end, size_bytes)
            for (first, end, size_bytes), uses in zip(self.lives(), self.of.values(), strict=True)
        ]

    def gaps(self) -> list[tuple[int, int, int]]:
        """Between two uses of a blob each: the first, the second, its bytes."""
        return [
            (start, end, self.sizes[blob])
            for blob, uses in self.of.items()
            for start, end in pairwise(uses)
        ]


def bounds(cycle: Cycle, capacity_bytes: int, rates: Rates) -> Bounds:
    """The least of ``cycle``, in which only blobs count that are saved in it."""
    uses = _Uses(cycle)
    excess = uses.excess(capacity_bytes)
    read_later = [max(0, e - u) for e, u in zip(excess, uses.useless(), strict=True)]
    return Bounds(
        written_bytes=_cover(uses.absences(), excess),
        read_bytes=_cover(uses.gaps(), read_later),
        waited_seconds=_least_wait(uses, excess, read_later, rates),
    )


def _cover(intervals: Sequence[tuple[int, int, int]], excess: Sequence[int]) -> int:
    """The fewest bytes of intervals (first, last, bytes; both ends outside) that cover it."""
    left = [size for _, _, size in intervals]
    chosen = [0] * len(intervals)
    for position, wanted in enumerate(excess):
        over = [n for n, (first, last, _) in enumerate(intervals) if first < position < last]
        missing = wanted - sum(chosen[n] for n in over)
        for n in sorted(over, key=lambda n: -intervals[n][1]):
            taken = max(0, min(missing, left[n]))
            chosen[n] += taken
            left[n] -= taken
            missing -= taken
    return sum(chosen)


def _least_wait(
    uses: _Uses, excess: Sequence[int], read_later: Sequence[int], rates: Rates
) -> float:
    loads = [uses.all[positions[-1]].seconds for positions in uses.of.values() if positions[1:]]
    if not loads:
        return 0.0
    first, last = uses.all[0].seconds, max(loads)
    waits = [0.0]
    for use, out, back in zip(uses.all, excess, read_later, strict=True):
        if out and use.seconds <= last:
            reached = max(use.seconds, first + out / rates.write)
            waits.append(reached + max(last - use.seconds, back / rates.read) - last)
    return max(waits)


def least_by_search(cycle: Cycle, capacity_bytes: int) -> tuple[int, int]:
    """The fewest bytes written, and the fewest read, by any policy with whole blobs.

    Tries every choice of what stays in the arena at each use, with a disk that takes no time. For
    some eight blobs.
    """
    uses = _Uses(cycle)
    return _search(uses, capacity_bytes, reads=False), _search(uses, capacity_bytes, reads=True)


def _search(uses: _Uses, capacity_bytes: int, reads: bool) -> int:
    """Over states (blobs in the arena, blobs written), the cheapest way to each."""
    states: dict[tuple[frozenset[int], frozenset[int]], int] = {(frozenset(), frozenset()): 0}
    for position, use in enumerate(uses.all):
        living = frozenset(
            blob
            for blob, positions in uses.of.items()
            if positions[0] <= position < uses.ends.get(blob, len(uses.all))
        )
        reached: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        for (ram, disk), cost in states.items():
            saved = position == uses.of[use.blob][0]
            read_bytes = 0 if saved or use.blob in ram else uses.sizes[use.blob]
            for kept in _subsets(sorted(ram & living - {use.blob})):
                if sum(uses.sizes[b] for b in kept) + uses.sizes[use.blob] > capacity_bytes:
                    continue
                gone = (ram & living) - kept - {use.blob} - disk
                now = kept | {use.blob}, disk & living | gone
                cost_now = cost + (read_bytes if reads else sum(uses.sizes[b] for b in gone))
                reached[now] = min(reached.get(now, cost_now), cost_now)
        states = reached
    return min(states.values())


def _subsets(items: Sequence[int]) -> list[frozenset[int]]:
    sets: list[frozenset[int]] = [frozenset()]
    for item in items:
        sets += [one | {item} for one in sets]
    return sets
