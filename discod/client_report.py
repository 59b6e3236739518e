"""What a client says of itself (:class:`discod.wire.messages.Report`), checked and kept.

It is for people alone. A client can say what it likes: it gets no more than its own lines wrong.
"""

from dataclasses import dataclass

from discod.bounds import Refusal
from discod.traffic import Rate
from discod.wire.messages import MAX_REPORT_SPANS, Report, WaitFor

_KINDS = frozenset(WaitFor)
TOTALS = tuple(name for name in Report.__match_args__ if name not in ("seq", "epoch", "spans"))
"""The numbers of a report that are totals."""

_NOTHING = Report(
    *(0, 0),
    *(0, 0, 0, 0),
    *(0, 0, 0, 0, 0, 0),
    spans=(),
)


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """One wait of a client's; begin and end in ns of CLOCK_MONOTONIC, as the client has it."""

    what: WaitFor
    begin_ns: int
    end_ns: int


def spans_of(report: Report) -> list[WaitSpan]:
    """The waits that a report tells of.

    Raises:
        Refusal: There are too many, one of them ends before it begins, or a total is negative.
    """
    numbers = report.spans
    if len(numbers) % 3 or len(numbers) > 3 * MAX_REPORT_SPANS:
        raise Refusal(f"{len(numbers)} numbers are not up to {MAX_REPORT_SPANS} spans of three")
    least = min(getattr(report, name) for name in TOTALS)
    if least < 0:
        raise Refusal(f"a total of {least}")
    spans = []
    for what, begin_ns, end_ns in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if what not in _KINDS or not 0 <= begin_ns <= end_ns:
            raise Refusal(f"a span of kind {what} from {begin_ns} to {end_ns}")
        spans.append(WaitSpan(WaitFor(what), begin_ns, end_ns))
    return spans


class Told:
    """All that one client has said of itself.

    Args:
        now: The monotonic clock, when it was attached.

    Attributes:
        report: The last one; all zero before the first.
        at: When it came; None before the first.
        resumed: The client was attached before: what its first report tells was counted by then.
    """

    def __init__(self, now: float) -> None:
        self.report = self._base = _NOTHING
        self.at: float | None = None
        self.resumed = False
        self._since = now
        self._shares = {what: Rate() for what in WaitFor}

    def take(self, report: Report, now: float) -> None:
        """A new report.

        Raises:
            Refusal: It makes no sense; the last one stays.
        """
        spans_of(report)
        if self.at is None and self.resumed:
            self._base = report
        else:
            # No call can have waited for longer than time has passed; several at once can.
            passed = now - self._since
            for what, share in self._shares.items():
                new, old = wait_seconds(report, what), wait_seconds(self.report, what)
                share.add(min(max(0.0, new - old), passed), now)
        self.report = report
        self.at = self._since = now

    def share(self, what: WaitFor, now: float) -> float:
        """The part of the last seconds, 0 to 1, that it has waited for ``what``."""
        return min(1.0, self._shares[what].per_second(now))

    def here(self, name: str) -> int:
        """What a number of the reports has grown by since the client was attached to this daemon.

        Never below 0, whatever the client says.
        """
        grown: int = getattr(self.report, name) - getattr(self._base, name)
        return max(0, grown)


def waits(report: Report, what: WaitFor) -> int:
    """How many calls have waited for ``what``."""
    counts = report.room_waits, report.read_waits, report.device_waits
    return counts[what]


def wait_seconds(report: Report, what: WaitFor) -> float:
    """For how long calls have waited for ``what``."""
    spent_ns = report.room_wait_ns, report.read_wait_ns, report.device_wait_ns
    return spent_ns[what] / 1e9
