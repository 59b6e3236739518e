"""What goes by, counted: bytes, calls, failures, and how fast. Of a client, or of a directory."""

import math
from collections import Counter

RATE_SECONDS = 3.0
"""What a rate is averaged over: long enough for a large blob, short enough for people who watch."""


class Rate:
    """An amount per second of about the last ``RATE_SECONDS``; older ones count ever less.

    Nothing runs for it: it costs an exponential function when something is added.
    """

    __slots__ = ("_at", "_per_second")

    def __init__(self) -> None:
        self._per_second = 0.0
        self._at = -math.inf

    def add(self, amount: float, now: float) -> None:
        """So much has gone by at ``now``, a time of the monotonic clock."""
        self._per_second = self.per_second(now) + amount / RATE_SECONDS
        self._at = now

    def per_second(self, now: float) -> float:
        """What it is at ``now``."""
        return self._per_second * math.exp(min(0.0, self._at - now) / RATE_SECONDS)


class Flow:
    """Requests of one direction that have ended.

    Attributes:
        count, size_bytes: Of those that succeeded.
        failures: Of each :class:`discod.wire.messages.Failure` how many; cancelling is none.
    """

    __slots__ = ("count", "failures", "rate", "size_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        self.rate = Rate()
        self.failures: Counter[str] = Counter()

    def add(self, size_bytes: int, now: float) -> None:
        """One has succeeded."""
        self.count += 1
        self.size_bytes += size_bytes
        self.rate.add(size_bytes, now)


class Traffic:
    """Both directions."""

    __slots__ = ("read", "written")

    def __init__(self) -> None:
        self.written = Flow()
        self.read = Flow()
