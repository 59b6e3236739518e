"""What a client says of itself (:class:`discod.wire.messages.Report`), checked.

It is for people alone. A client can say what it likes: it gets no more than its own lines wrong.
"""

from dataclasses import dataclass

from discod.bounds import Refusal
from discod.wire.messages import MAX_REPORT_SPANS, Report, WaitFor

_KINDS = frozenset(WaitFor)


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
    totals = (
        *(report.cycles, report.saved_bytes, report.elided_bytes, report.loads),
        *(report.room_waits, report.room_wait_ns, report.read_waits, report.read_wait_ns),
        *(report.device_waits, report.device_wait_ns),
    )
    if min(totals) < 0:
        raise Refusal(f"a total of {min(totals)}")
    spans = []
    for what, begin_ns, end_ns in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if what not in _KINDS or not 0 <= begin_ns <= end_ns:
            raise Refusal(f"a span of kind {what} from {begin_ns} to {end_ns}")
        spans.append(WaitSpan(WaitFor(what), begin_ns, end_ns))
    return spans
