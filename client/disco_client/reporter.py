"""What a session alone knows, told to the daemon now and then, for ``discod status`` and the like.

It costs the trainer's thread one more message: at the end of a cycle, and about once a second in
between, from calls that are made anyway. There is no thread and no timer, so a process that
computes for a minute without a call says nothing in that time. One report at a time is unanswered:
a daemon that is away or frozen finds one when it is back, with the numbers of then.
"""

import time
from collections.abc import Sequence
from functools import partial

from disco_client.link import Link
from disco_client.residency import Residency
from disco_client.waits import Waits
from discod.wire.messages import Reply, Report, WaitFor

REPORT_SECONDS = 1.0
"""Within a cycle: as often as people look."""

CYCLE_SECONDS = 0.1
"""Of cycles that are shorter not each is told of; the next report includes them."""


class Reporter:
    """One session's. Its lock covers all of it.

    Args:
        link: Where reports go.
        residency, waits: What they are about.
    """

    def __init__(self, link: Link, residency: Residency, waits: Waits) -> None:
        self._link = link
        self._residency = residency
        self._waits = waits
        self._loads = 0
        self._elided_bytes = 0
        # The first cycle is told of, however short it is.
        self._sent_at = time.monotonic() - CYCLE_SECONDS
        self._unanswered = False

    def look(self) -> None:
        """Report, if it is time to."""
        now = time.monotonic()
        if now - self._sent_at >= REPORT_SECONDS:
            self._send(now)

    def loaded(self) -> None:
        """A load has ended."""
        self._loads += 1
        self.look()

    def end_cycle(self) -> None:
        """A cycle has ended: report, unless another one has just ended too."""
        now = time.monotonic()
        if now - self._sent_at >= CYCLE_SECONDS:
            self._send(now)

    def _send(self, now: float) -> None:
        if not self._unanswered:
            self._sent_at = now
            self._unanswered = True
            make = partial(self._make, _flat(self._waits.take_spans()))
            self._link.request(make, self._answered)

    def _make(self, spans: tuple[int, ...], seq: int, epoch: int) -> Report:
        totals = self._residency.totals
        # A write that began after all takes back what was counted; whoever reads takes a total
        # that falls for one that began anew.
        self._elided_bytes = max(self._elided_bytes, totals.elided_bytes)
        room_waits, room_seconds = self._waits.so_far(WaitFor.ROOM)
        read_waits, read_seconds = self._waits.so_far(WaitFor.READ)
        device_waits, device_seconds = self._waits.so_far(WaitFor.DEVICE)
        return Report(
            seq,
            epoch,
            cycles=self._residency.cycles,
            saved_bytes=totals.saved_bytes,
            elided_bytes=self._elided_bytes,
            loads=self._loads,
            room_waits=room_waits,
            room_wait_ns=_ns(room_seconds),
            read_waits=read_waits,
            read_wait_ns=_ns(read_seconds),
            device_waits=device_waits,
            device_wait_ns=_ns(device_seconds),
            spans=spans,
        )

    def _answered(self, reply: Reply) -> None:
        self._unanswered = False


def _flat(spans: Sequence[tuple[WaitFor, float, float]]) -> tuple[int, ...]:
    return tuple(
        number
        for what, began, ended in spans
        for number in (int(what), _ns(began), max(_ns(began), _ns(ended)))
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
