"""A disk with a clock: requests in, their ends out, at rates that do not change.

What runs next is the daemon's own schedule. Pieces under way share the disk evenly.
"""

from dataclasses import dataclass

from discod.schedule import Entry, Priority, Schedule


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the disk is.

    Attributes:
        write, read: Bytes per second.
        latency_seconds: From the start of a piece until its bytes begin to move.
        threads: Pieces under way at a time.
        chunk_bytes: Most bytes of a piece.
    """

    write: float = 2.4e9
    read: float = 1.8e9
    latency_seconds: float = 100e-6
    threads: int = 4
    chunk_bytes: int = 8 << 20


class Request(Entry):
    """One write or read of a blob."""

    __slots__ = ("blob", "cancelled")

    def __init__(self, blob: int, priority: Priority, size_bytes: int) -> None:
        super().__init__("trainer", priority, size_bytes)
        self.blob = blob
        self.cancelled = False

    @property
    def writes(self) -> bool:
        """Whether it is a write."""
        return self.priority is Priority.WRITE


@dataclass(slots=True)
class _Piece:
    request: Request
    latency: float
    work: float
    """Seconds of the whole disk that it still needs."""


class Disk:
    """Requests that are queued or under way, and the time.

    Args:
        rates: Its rates.
    """

    def __init__(self, rates: Rates) -> None:
        self.now = 0.0
        self._rates = rates
        self._schedule: Schedule[Request] = Schedule(rates.threads, rates.chunk_bytes)
        self._pieces: list[_Piece] = []
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether anything will end."""
        return bool(self._requests)

    def submit(self, blob: int, priority: Priority, size_bytes: int) -> None:
        """Queue a request of a blob that has none."""
        request = Request(blob, priority, size_bytes)
        self._requests[blob] = request
        self._schedule.push(request)

    def cancel(self, blob: int) -> None:
        """Cancel the blob's request, unless it has begun."""
        request = self._requests[blob]
        if self._schedule.cancel(request):
            request.cancelled = True
            self._ended.append(request)

    def promote(self, blob: int) -> None:
        """Make the blob's prefetch urgent."""
        self._schedule.promote(self._requests[blob])

    def take_ended(self) -> list[Request]:
        """What has ended until now, once."""
        ended, self._ended = self._ended, []
        for request in ended:
            del self._requests[request.blob]
        return ended

    def run_until(self, when: float) -> None:
        """Let time pass."""
        while (step := self._step_seconds()) is not None and self.now + step <= when:
            self._pass(step)
        self._pass(when - self.now)

    def run_until_ended(self) -> None:
        """Let time pass until something has ended. Something must be busy."""
        while not self._ended:
            step = self._step_seconds()
            if step is None:
                raise RuntimeError("nothing is under way")
            self._pass(step)

    def _step_seconds(self) -> float | None:
        """Until the next piece ends or begins to move; None: none is under way."""
        while len(self._pieces) < self._rates.threads and (piece := self._schedule.pop()):
            request, _, length = piece
            rate = self._rates.write if request.writes else self._rates.read
            self._pieces.append(_Piece(request, self._rates.latency_seconds, length / rate))
        if not self._pieces:
            return None
        moving = sum(piece.latency == 0 for piece in self._pieces)
        return min(piece.latency or piece.work * moving for piece in self._pieces)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        moving = sum(piece.latency == 0 for piece in self._pieces)
        for piece in list(self._pieces):
            if piece.latency:
                piece.latency = _less(piece.latency, seconds)
                continue
            piece.work = _less(piece.work, seconds / moving)
            if not piece.work:
                self._pieces.remove(piece)
                if self._schedule.finish(piece.request):
                    self._ended.append(piece.request)


def _less(amount: float, by: float) -> float:
    """The difference, which rounding leaves no trace of when it is 0."""
    return amount - by if amount - by > 1e-12 else 0.0
