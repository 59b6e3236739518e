"""Every policy on every trace, beside the offline optimum."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from disco_client.residency import Residency
from tests.simulation.bounds import Bounds, bounds
from tests.simulation.disk import Rates
from tests.simulation.machine import Outcome, Policy, play
from tests.simulation.policies import LeastRecentlyUsed, Watermark, WriteEverything
from tests.simulation.traces import Trace

POLICIES: dict[str, Callable[[int], Policy]] = {
    "discod": lambda capacity_bytes: Residency(capacity_bytes, files=1),
    Watermark.name: Watermark,
    LeastRecentlyUsed.name: LeastRecentlyUsed,
    WriteEverything.name: WriteEverything,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What some cycles took, beside the least.

    Attributes:
        outcome: What the policy took.
        least: What no policy can do better.
    """

    outcome: Outcome
    least: Bounds

    @property
    def written_over_least(self) -> float | None:
        """None when nothing had to be written."""
        return _ratio(self.outcome.written_bytes, self.least.written_bytes)

    @property
    def read_over_least(self) -> float | None:
        """None when nothing had to be read."""
        return _ratio(self.outcome.read_bytes, self.least.read_bytes)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace.

    Attributes:
        first: The first cycle, in which nothing is known.
        steady: The cycles from the trace's ``steady`` on, together.
    """

    trace: str
    policy: str
    first: Figures
    steady: Figures


def compare(
    trace: Trace, rates: Rates, policies: Sequence[str] = tuple(POLICIES)
) -> dict[str, Row]:
    """The rows of one trace, by policy."""
    least = [bounds(cycle, trace.capacity_bytes, rates) for cycle in trace.cycles]
    rows = {}
    for name in policies:
        outcomes = play(trace, POLICIES[name](trace.capacity_bytes), rates)
        steady = Figures(sum(outcomes[trace.steady :], Outcome()), _sum(least[trace.steady :]))
        rows[name] = Row(trace.name, name, Figures(outcomes[0], least[0]), steady)
    return rows


def as_json(row: Row) -> dict[str, Any]:
    """The row's figures, with their ratios."""
    made: dict[str, Any] = {"trace": row.trace, "policy": row.policy}
    for name, figures in (("first", row.first), ("steady", row.steady)):
        made[name] = {
            **asdict(figures.outcome),
            "waited_seconds": figures.outcome.waited_seconds,
            "least": asdict(figures.least),
            "written_over_least": figures.written_over_least,
            "read_over_least": figures.read_over_least,
        }
    return made


def _sum(least: Sequence[Bounds]) -> Bounds:
    return Bounds(
        sum(one.written_bytes for one in least),
        sum(one.read_bytes for one in least),
        sum(one.waited_seconds for one in least),
    )


def _ratio(value: float, least: float) -> float | None:
    return value / least if least else None
