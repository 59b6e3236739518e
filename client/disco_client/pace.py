"""The clock of :mod:`disco_client.keep_up`: measures a session's cycles, and says what is found."""

import logging
import time
from typing import Protocol

from disco_client.instructions import Counters
from disco_client.keep_up import Cycle, KeepUp
from disco_client.waits import Waits

_log = logging.getLogger(__name__)

_said = False
"""Once for a process, however often it attaches."""


class Busy(Protocol):
    """What moves the bytes."""

    @property
    def busy_seconds(self) -> float:
        """For how long anything was under way."""


class Pace:
    """A session's.

    Args:
        arena_bytes: Size of its arena.
    """

    def __init__(self, arena_bytes: int) -> None:
        self._keep_up = KeepUp(arena_bytes)
        self._began = time.monotonic()
        self._busy_seconds = 0.0
        self._device_seconds = 0.0

    def end_cycle(self, traffic: Counters, waits: Waits, transfers: Busy) -> None:
        """A cycle is over, which ``traffic`` and the last cycle of ``waits`` are of."""
        global _said
        now, busy_seconds = time.monotonic(), transfers.busy_seconds
        saves, loads = waits.last_cycle
        cycle = Cycle(
            seconds=now - self._began,
            save_wait_seconds=max(0.0, saves - (waits.device_seconds - self._device_seconds)),
            load_wait_seconds=loads,
            busy_seconds=busy_seconds - self._busy_seconds,
            moved_bytes=traffic.written_bytes + traffic.read_bytes,
            saved_bytes=traffic.saved_bytes,
        )
        self._began, self._busy_seconds = now, busy_seconds
        self._device_seconds = waits.device_seconds
        text = self._keep_up.end_cycle(cycle)
        if text is not None and not _said:
            _said = True
            _log.warning("%s", text)
