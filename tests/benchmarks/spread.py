"""Medians and ranges. A ratio is always of two figures of one round, never of two medians."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


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


def spread(values: Sequence[float]) -> dict[str, float]:
    """A :class:`Spread` of ``values``, for JSON."""
    return asdict(Spread.of(values))


def ratios(ours: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The spread of ours over theirs, round by round, for JSON."""
    return spread([a / b for a, b in zip(ours, others, strict=True)])


def show(values: dict[str, Any], digits: int = 2, scale: float = 1.0) -> str:
    """``1.02 (0.97-1.05)``: median, least and greatest."""
    middle, least, greatest = (
        f"{values[name] * scale:.{digits}f}" for name in ("median", "least", "greatest")
    )
    return middle if least == greatest else f"{middle} ({least}-{greatest})"
