"""What a session alone knows, told to the daemon now and then, for ``discod status`` and the like.

It costs the trainer's thread one more message: at the end of a cycle, and about once a second in
between, from calls that are made anyway. There is no thread and no timer, so a process that
computes for a minute without a call says nothing in that time. One report at a time is unanswered:
a daemon that is away or frozen finds one when it is back, with the numbers of then.
"""

import math
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
        self._told: dict[str, int] = {}
        self._sent_at = time.monotonic()
        self._cycle_sent_at = -math.inf
        self._unanswered = False
        self._cycle_untold = False

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
        """A cycle has ended: report, unless that was done for another one just now."""
        now = time.monotonic()
        if now - self._cycle_sent_at >= CYCLE_SECONDS:
            self._cycle_sent_at = now
            self._cycle_untold = self._unanswered
            self._send(now)

    def _send(self, now: float) -> None:
        if not self._unanswered:
            self._sent_at = now
            self._unanswered = True
            make = partial(self._make, _flat(self._waits.take_spans()))
            self._link.request(make, self._answered)

    def _make(self, spans: tuple[int, ...], seq: int, epoch: int) -> Report:
        totals = self._residency.totals
        room_waits, room_seconds = self._waits.so_far(WaitFor.ROOM)
        read_waits, read_seconds = self._waits.so_far(WaitFor.READ)
        device_waits, device_seconds = self._waits.so_far(WaitFor.DEVICE)
        now = {
            "cycles": self._residency.cycles,
            "saved_bytes": totals.saved_bytes,
            "elided_bytes": totals.elided_bytes,
            "loads": self._loads,
            "room_waits": room_waits,
            "room_wait_ns": _ns(room_seconds),
            "read_waits": read_waits,
            "read_wait_ns": _ns(read_seconds),
            "device_waits": device_waits,
            "device_wait_ns": _ns(device_seconds),
        }
        # None falls: whoever reads would take it for one that began anew. A write that began after
        # all takes elided bytes back, and another thread's wait may be ending at this moment.
        self._told = {name: max(number, self._told.get(name, 0)) for name, number in now.items()}
        return Report(seq, epoch, **self._told, spans=spans)

    def _answered(self, reply: Reply) -> None:
        self._unanswered = False
        if self._cycle_untold:
            self._cycle_untold = False
            self._send(time.monotonic())


def _flat(spans: Sequence[tuple[WaitFor, float, float]]) -> tuple[int, ...]:
    return tuple(
        number
        for what, began, ended in spans
        for number in (int(what), _ns(began), max(_ns(began), _ns(ended)))
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
