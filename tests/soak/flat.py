"""Whether something sampled over time is flat, once the warm-up is over.

Memory goes up and down with what a process does at the moment, so its growth is that of a line
through all samples, by the median of the slopes between pairs of them (Theil, 1950; Sen, 1968),
which single peaks do not move. What is counted (fds, threads, mappings) is compared by the medians
of the first and the last third: of something that leaks, the last third has more.
"""

from collections.abc import Sequence
from statistics import median

WARM_UP_SHARE = 0.25
"""Of the samples, left out: allocators, thread pools and arenas fill in that time."""


def growth(points: Sequence[tuple[float, float]]) -> float:
    """How much the line through the points after the warm-up rises from first to last."""
    points = points[int(len(points) * WARM_UP_SHARE) :]
    slopes = [
        (y2 - y1) / (x2 - x1)
        for index, (x1, y1) in enumerate(points)
        for x2, y2 in points[index + 1 :]
        if x2 > x1
    ]
    return median(slopes) * (points[-1][0] - points[0][0]) if slopes else 0.0


def climb(values: Sequence[int]) -> int:
    """By how much the median of the last third is above that of the first, after the warm-up."""
    values = values[int(len(values) * WARM_UP_SHARE) :]
    third = max(1, len(values) // 3)
    return int(median(values[-third:]) - median(values[:third]))
