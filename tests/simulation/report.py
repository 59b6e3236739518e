"""The figures as tables: bytes over the least possible, and the part of the time that is waited."""

from collections.abc import Sequence

from rich.table import Table

from tests.simulation.compare import Figures, Row
from tests.simulation.traces import MIB


def table(rows: Sequence[Row]) -> Table:
    """For the terminal; in brackets the least wait, where there must be one."""
    made = Table("trace", "policy")
    for which in ("first", "steady"):
        for what in ("written", "read", "waited"):
            made.add_column(f"{which}\n{what}", justify="right")
    last = ""
    for row in rows:
        if last not in ("", row.trace):
            made.add_section()
        shown = [*_cells(row.first), *_cells(row.steady)]
        made.add_row(row.trace if row.trace != last else "", row.policy, *shown)
        last = row.trace
    return made


def markdown(rows: Sequence[Row]) -> str:
    """For ``docs/disk.md``: a line for each trace; each cell is written / read / waited."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    ours, *others = policies
    lines = [
        f"| trace | {ours}, first cycle | {ours}, later | {' | '.join(others)} |",
        "|---" * (len(policies) + 2) + "|",
    ]
    for trace in dict.fromkeys(row.trace for row in rows):
        of = {row.policy: row for row in rows if row.trace == trace}
        figures = [of[ours].first, *(of[policy].steady for policy in policies)]
        cells = " | ".join(" / ".join(_cells(one)) for one in figures)
        lines.append(f"| {trace} | {cells} |")
    return "\n".join(lines)


def _cells(figures: Figures) -> tuple[str, str, str]:
    outcome = figures.outcome
    least = figures.least.waited_seconds / outcome.computed_seconds
    part = outcome.waited_seconds / outcome.computed_seconds
    return (
        _over(figures.written_over_least, outcome.written_bytes),
        _over(figures.read_over_least, outcome.read_bytes),
        f"{part:.1%}" + (f" ({least:.1%})" if least >= 0.0005 else ""),
    )


def _over(ratio: float | None, size_bytes: int) -> str:
    if ratio is not None:
        return f"{ratio:.2f}"
    return f"{size_bytes // MIB} MiB" if size_bytes else "0"
