"""A median with the range around it: how the benchmarks state their figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the range around it."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        """As ``median (least-greatest)``."""
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.greatest:.{digits}f})"
