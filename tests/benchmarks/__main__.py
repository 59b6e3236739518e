"""``python -m tests.benchmarks``: run the benchmarks, draw their charts, make the page."""

import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from tests.benchmarks import page, plots
from tests.benchmarks.frame import RunOptions, run_all
from tests.benchmarks.suite import BENCHMARKS

NOTES = Path(__file__).parent / "notes"
_NAMES = {benchmark.name: benchmark for benchmark in BENCHMARKS}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(_NAMES)), metavar="[NAME]...")
@click.option("--full", is_flag=True, help="All sizes and systems, for the published page.")
@click.option(
    "--out",
    default=Path("bench-results/benchmarks"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="For the JSON files and charts; the page goes beside it, with '.md'.",
)
@click.option(
    "--directory",
    default=Path(),
    show_default="the working directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="On the disk to measure; all files in it are temporary.",
)
@click.option("--page-only", is_flag=True, help="Measure nothing: make page and charts again.")
def main(names: tuple[str, ...], full: bool, out: Path, directory: Path, page_only: bool) -> None:
    """Run the benchmarks NAME (all by default) and write what they found.

    Names: io, calls, training, gil, scale, start, policy.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    chosen = [_NAMES[name] for name in names] or list(BENCHMARKS)
    ran, failed = [benchmark.name for benchmark in chosen], {}
    if not page_only:
        with (
            tempfile.TemporaryDirectory(prefix="discod-bench-", dir=directory) as folder,
            console.status("starting") as status,
        ):
            report = run_all(chosen, RunOptions(Path(folder), full), out, status.update)
        ran, failed = report.ran, report.failed
    write(out)
    for benchmark in chosen:
        if benchmark.name not in ran:  # what is there is an earlier run's
            continue
        path = out / f"{benchmark.name}.json"
        result = page.load(path)
        for goal in benchmark.goals(result["result"]) if result else ():
            word = {True: "met", False: "MISSED", None: "?"}[goal.met]
            console.print(
                f"{word:6}  {benchmark.name}: {goal.text}: {goal.figure}", highlight=False
            )
    for name, reason in failed.items():
        console.print(f"FAILED  {name}: {reason}", highlight=False)
    console.print(f"the page: {out.with_suffix('.md')}", highlight=False)
    sys.exit(1 if failed else 0)


def write(out: Path) -> None:
    """Charts and page of the JSON files in ``out``."""
    for benchmark in BENCHMARKS:
        whole = page.load(out / f"{benchmark.name}.json")
        if whole is not None and plots.can_draw():
            for plot in benchmark.plots(whole["result"]):
                plots.draw(plot, out)
    out.with_suffix(".md").write_text(page.make(BENCHMARKS, out, NOTES))


if __name__ == "__main__":
    main()
