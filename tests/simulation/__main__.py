"""``python -m tests.simulation``: the table of all policies on all traces."""

import json
from pathlib import Path

import click
from rich.console import Console

from tests.simulation import report
from tests.simulation.compare import as_json, compare
from tests.simulation.disk import Rates
from tests.simulation.traces import all_traces


@click.command()
@click.option("--write", default=2.4, show_default=True, help="GB/s that the disk writes.")
@click.option("--read", default=1.8, show_default=True, help="GB/s that the disk reads.")
@click.option("--only", default="", help="Traces whose name has this in it.")
@click.option("--markdown", is_flag=True, help="Print the table of docs/disk.md.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures there, as JSON.")
def main(write: float, read: float, only: str, markdown: bool, out: Path | None) -> None:
    """Print bytes over the least possible, and the time waited, of each policy on each trace."""
    rates = Rates(write * 1e9, read * 1e9)
    traces = [trace for trace in all_traces() if only in trace.name]
    rows = [row for trace in traces for row in compare(trace, rates).values()]
    if markdown:
        click.echo(report.markdown(rows))
    else:
        Console(width=140).print(report.table(rows))
    if out is not None:
        out.write_text(json.dumps([as_json(row) for row in rows], indent=1) + "\n")


main()
