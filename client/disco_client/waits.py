"""How long calls of one session have waited, and for whom waiting is worth it."""

import threading
import time
from collections import deque

from discod.wire.messages import MAX_REPORT_SPANS, WaitFor

LOAN_WAIT_SECONDS = 10.0
"""How long a call waits for room that other threads' loaded tensors hold, before ``ArenaFull``."""


class Wait:
    """One call's.

    Args:
        for_loans: Whether other threads may hold loans, whose end is worth waiting for.
        running: Where it is while it lasts.

    Attributes:
        what: What it waits for, or waited for at first.
    """

    def __init__(self, for_loans: bool, running: "set[Wait]") -> None:
        self._for_loans = for_loans
        self._running = running
        self._began: float | None = None
        self.what = WaitFor.ROOM

    def begin(self, what: WaitFor) -> None:
        """The call cannot go on; again is no error."""
        if self._began is None:
            self._began = time.monotonic()
            self.what = what
            self._running.add(self)

    def end(self) -> tuple[float, float] | None:
        """When it began and ended; None: it never had to wait."""
        if self._began is None:
            return None
        self._running.discard(self)
        return self._began, time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """Whether it should not wait for loans any longer."""
        return not self._for_loans or self.seconds > LOAN_WAIT_SECONDS


class Waits:
    """All of a session's. Pairs are seconds of saves and of loads."""

    def __init__(self) -> None:
        self.save_seconds = 0.0
        self.load_seconds = 0.0
        self.last_cycle = (0.0, 0.0)
        self.device_seconds = 0.0
        """Of saves, for copies off a device."""
        self._cycle_start = (0.0, 0.0)
        self._threads: set[int] = set()
        self._running: set[Wait] = set()
        self._ended = dict.fromkeys(WaitFor, (0, 0.0))
        self._spans: deque[tuple[WaitFor, float, float]] = deque(maxlen=MAX_REPORT_SPANS)

    @property
    def totals(self) -> tuple[float, float]:
        """Since the start."""
        return self.save_seconds, self.load_seconds

    def begin(self) -> Wait:
        """A call by the calling thread, which waits no time as yet.

        Its end is to be told: :meth:`end_save` or :meth:`end_load`.
        """
        self._threads.add(threading.get_ident())
        return Wait(len(self._threads) > 1, self._running)

    def end_save(self, wait: Wait) -> None:
        """A save has ended, whatever came of it."""
        seconds = self._end(wait)
        self.save_seconds += seconds
        if wait.what is WaitFor.DEVICE:
            self.device_seconds += seconds

    def end_load(self, wait: Wait) -> None:
        """A load has ended, whatever came of it."""
        self.load_seconds += self._end(wait)

    def end_cycle(self) -> None:
        """No blob is alive: note what the cycle has added."""
        saves, loads = self._cycle_start
        self.last_cycle = self.save_seconds - saves, self.load_seconds - loads
        self._cycle_start = self.totals

    def so_far(self, what: WaitFor) -> tuple[int, float]:
        """How many calls have waited for ``what``, and for how many seconds, up to this moment."""
        count, seconds = self._ended[what]
        # Copied in one step, for other threads begin and end waits meanwhile.
        running = [wait for wait in list(self._running) if wait.what is what]
        return count + len(running), seconds + sum(wait.seconds for wait in running)

    def take_spans(self) -> list[tuple[WaitFor, float, float]]:
        """What was waited for, from when, until when: the waits that ended since the last call.

        Only the last ``MAX_REPORT_SPANS`` of them.
        """
        spans = []
        while self._spans:
            spans.append(self._spans.popleft())
        return spans

    def _end(self, wait: Wait) -> float:
        """Note that it is over; its seconds."""
        span = wait.end()
        if span is None:
            return 0.0
        began, ended = span
        count, seconds = self._ended[wait.what]
        self._ended[wait.what] = count + 1, seconds + ended - began
        self._spans.append((wait.what, began, ended))
        return ended - began
