"""What no policy can do better, whatever it knows: bytes written, bytes read, seconds waited.

Why these are bounds
--------------------
A blob is *needed* from its save to its last load; a policy that knows the future drops it then. At
each save and load the blob at hand is in the arena, and all others that are needed are in the
arena or on disk. So at a save or load at which what is needed exceeds the arena by d bytes, d bytes
of the others are on disk, and:

* *Written:* these bytes were written. Blobs may be split here, and be on disk for free once they
  were written, so what must be written at least is a covering problem: choose bytes of blobs so
  that each moment's excess is covered by chosen bytes of those that can be away at that moment. A
  blob can be away from after its save until its last load, which is one interval. With intervals,
  choosing those that end last, from the first moment to the last, is optimal.
* *Read:* these bytes are read later, each time anew. Here the intervals are the gaps between two
  uses of a blob, and all else is the same.
* *Waited:* by the moment t with excess d, d bytes had been written since the first save, and after
  it d bytes are read before the last load. So the last load begins no sooner than
  max(t as computed, first save + d / write rate) + max(rest as computed, d / read rate).

All three hold with whole blobs and with an arena in pieces, where the least can only be more.
:func:`least_by_search` finds the true least for a few blobs, by trying everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.disk import Rates
from tests.simulation.traces import Compute, Cycle, Load, Save


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
                case _:
                    pass

    def excess(self, capacity_bytes: int) -> list[int]:
        """By position: bytes that cannot be in the arena then."""
        needed = 0
        excess = []
        for position, use in enumerate(self.all):
            needed += self.sizes[use.blob] * (position == self.of[use.blob][0])
            excess.append(max(0, needed - capacity_bytes))
            needed -= self.sizes[use.blob] * (position == self.of[use.blob][-1])
        return excess

    def lives(self) -> list[tuple[int, int, int]]:
        """Of each blob: its save, its last load, its bytes."""
        return [(uses[0], uses[-1], self.sizes[blob]) for blob, uses in self.of.items()]

    def gaps(self) -> list[tuple[int, int, int]]:
        """Between two uses of a blob each: the first, the second, its bytes."""
        return [
            (start, end, self.sizes[blob])
            for blob, uses in self.of.items()
            for start, end in zip(uses, uses[1:], strict=False)
        ]


def bounds(cycle: Cycle, capacity_bytes: int, rates: Rates) -> Bounds:
    """The least of ``cycle``, in which only blobs count that are saved in it."""
    uses = _Uses(cycle)
    excess = uses.excess(capacity_bytes)
    return Bounds(
        written_bytes=_cover(uses.lives(), excess),
        read_bytes=_cover(uses.gaps(), excess),
        waited_seconds=_least_wait(uses, excess, rates),
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


def _least_wait(uses: _Uses, excess: Sequence[int], rates: Rates) -> float:
    loads = [uses.all[positions[-1]].seconds for positions in uses.of.values() if positions[1:]]
    if not loads:
        return 0.0
    first, last = uses.all[0].seconds, max(loads)
    waits = [0.0]
    for use, size_bytes in zip(uses.all, excess, strict=True):
        if size_bytes and use.seconds <= last:
            reached = max(use.seconds, first + size_bytes / rates.write)
            waits.append(reached + max(last - use.seconds, size_bytes / rates.read) - last)
    return max(waits)


def least_by_search(cycle: Cycle, capacity_bytes: int) -> tuple[int, int]:
    """The fewest bytes written, and the fewest read, by any policy with whole blobs.

    Tries every choice of what is in the arena after each use, with a disk that takes no time. For
    some eight blobs.
    """
    uses = _Uses(cycle)
    return _search(uses, capacity_bytes, reads=False), _search(uses, capacity_bytes, reads=True)


def _search(uses: _Uses, capacity_bytes: int, reads: bool) -> int:
    """Over states (blobs in the arena, blobs on disk), the cheapest way to each."""
    states: dict[tuple[frozenset[int], frozenset[int]], int] = {(frozenset(), frozenset()): 0}
    for position, use in enumerate(uses.all):
        saved = position == uses.of[use.blob][0]
        reached: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        for (ram, disk), cost in states.items():
            read_bytes = 0 if saved or use.blob in ram else uses.sizes[use.blob]
            for kept in _subsets(sorted(ram - {use.blob})):
                if sum(uses.sizes[b] for b in kept) + uses.sizes[use.blob] > capacity_bytes:
                    continue
                gone = ram - kept - {use.blob} - disk
                written_bytes = sum(uses.sizes[b] for b in gone)
                over = position == uses.of[use.blob][-1]
                done = frozenset({use.blob} if over else ())
                now = (kept | {use.blob}) - done, (disk | gone) - done
                cost_now = cost + (read_bytes if reads else written_bytes)
                reached[now] = min(reached.get(now, cost_now), cost_now)
        states = reached
    return min(states.values())


def _subsets(items: Sequence[int]) -> list[frozenset[int]]:
    sets: list[frozenset[int]] = [frozenset()]
    for item in items:
        sets += [one | {item} for one in sets]
    return sets
