"""``python -m tests.simulation``: the table of all policies on all traces."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.simulation.compare import Figures, as_json, compare
from tests.simulation.disk import Rates
from tests.simulation.traces import MIB, all_traces


@click.command()
@click.option("--write", default=2.4, show_default=True, help="GB/s that the disk writes.")
@click.option("--read", default=1.8, show_default=True, help="GB/s that the disk reads.")
@click.option("--only", default="", help="Traces whose name has this in it.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures there, as JSON.")
def main(write: float, read: float, only: str, out: Path | None) -> None:
    """Print bytes over the least possible, and seconds waited, of each policy on each trace."""
    rates = Rates(write * 1e9, read * 1e9)
    traces = [trace for trace in all_traces() if only in trace.name]
    rows = [row for trace in traces for row in compare(trace, rates).values()]
    table = Table("trace", "policy")
    for which in ("first", "steady"):
        for what in ("written", "read", "waited"):
            table.add_column(f"{which}\n{what}", justify="right")
    last = ""
    for row in rows:
        if last not in ("", row.trace):
            table.add_section()
        shown = [*_cells(row.first), *_cells(row.steady)]
        table.add_row(row.trace if row.trace != last else "", row.policy, *shown)
        last = row.trace
    Console(width=140).print(table)
    if out is not None:
        out.write_text(json.dumps([as_json(row) for row in rows], indent=1) + "\n")


def _cells(figures: Figures) -> tuple[str, str, str]:
    outcome = figures.outcome
    least = figures.least.waited_seconds
    part = outcome.waited_seconds / outcome.computed_seconds
    return (
        _over(figures.written_over_least, outcome.written_bytes),
        _over(figures.read_over_least, outcome.read_bytes),
        f"{part:.1%}" + (f" ({least / outcome.computed_seconds:.1%})" if least else ""),
    )


def _over(ratio: float | None, size_bytes: int) -> str:
    if ratio is not None:
        return f"{ratio:.2f}"
    return f"{size_bytes // MIB} MiB" if size_bytes else "0"


main()
