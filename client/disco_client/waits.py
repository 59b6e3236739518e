"""How long calls of one session have waited, and for whom waiting is worth it."""

import threading
import time

LOAN_WAIT_SECONDS = 10.0
"""How long a call waits for room that other threads' loaded tensors hold, before ``ArenaFull``."""


class Wait:
    """One call's.

    Args:
        for_loans: Whether other threads may hold loans, whose end is worth waiting for.
    """

    def __init__(self, for_loans: bool) -> None:
        self._for_loans = for_loans
        self._began: float | None = None
        self.for_device = False
        """Whether it is a device that the call waits for, and not the disk."""

    def begin(self) -> None:
        """The call cannot go on; again is no error."""
        if self._began is None:
            self._began = time.monotonic()

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

    @property
    def totals(self) -> tuple[float, float]:
        """Since the start."""
        return self.save_seconds, self.load_seconds

    def begin(self) -> Wait:
        """A call by the calling thread, which waits no time as yet.

        Its end is to be told: :meth:`end_save` or :meth:`end_load`.
        """
        self._threads.add(threading.get_ident())
        return Wait(for_loans=len(self._threads) > 1)

    def end_save(self, wait: Wait) -> None:
        """A save has ended, whatever came of it."""
        seconds = wait.seconds
        self.save_seconds += seconds
        self.device_seconds += seconds * wait.for_device

    def end_load(self, wait: Wait) -> None:
        """A load has ended, whatever came of it."""
        self.load_seconds += wait.seconds

    def end_cycle(self) -> None:
        """No blob is alive: note what the cycle has added."""
        saves, loads = self._cycle_start
        self.last_cycle = self.save_seconds - saves, self.load_seconds - loads
        self._cycle_start = self.totals
