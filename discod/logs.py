"""The daemon's log: one line per event worth reading, on stderr, and no flood."""

import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


def set_up(level: str) -> None:
    """Send the log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("discod")
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False


class RateLimited:
    """Logs a kind of warning now and then, with how many were left out since."""

    def __init__(self, log: logging.Logger, seconds: float = 10.0) -> None:
        self._log = log
        self._seconds = seconds
        self._next = 0.0
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Log, unless the last one is too fresh."""
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        if self._left_out:
            text += " (and %d more like it)"
            args = (*args, self._left_out)
        self._log.warning(text, *args)
        self._next = now + self._seconds
        self._left_out = 0
