"""``python -m examples.demo``: run it, show how far it is, print the table."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from discod.wire import align_up
from discod.wire.sizes import format_size
from examples.demo.jobs import DemoFailed, Place, ending_on_signals
from examples.demo.messages import DISCOD, PLAIN, Settings, StepReport
from examples.demo.report import DaemonCost, Steps, differences, table

EXIT_DIFFERENT = 1
EXIT_FAILED = 3

WIDTH = 128
LEAST_ARENA_BLOBS = 3
"""One in use, one on its way in, one on its way out."""
TABLE_COLUMNS = 100
"""No cell wraps in so many, also when the output is no terminal."""
DIFFERENCES_SHOWN = 10


def arena_bytes(share: float, layers: int, hidden_bytes: int) -> int:
    """``share`` of the layer inputs, but never less than can work."""
    return align_up(max(int(share * layers * hidden_bytes), LEAST_ARENA_BLOBS * hidden_bytes))


def run(
    place: Place, settings: Settings, ranks: int, steps: int, console: Console
) -> tuple[Steps, Steps, DaemonCost]:
    """All steps of both variants, taking turns, and what they cost the daemon."""
    reports: dict[str, list[Sequence[StepReport]]] = {PLAIN: [], DISCOD: []}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} steps"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("starting the ranks", total=2 * steps)
        jobs = place.start_jobs(tuple(reports), ranks, settings)
        daemon = psutil.Process(place.daemon.pid)
        idle_cpu = daemon.cpu_times()
        for step in range(steps):
            for job in jobs:
                progress.update(task, description=f"step {step + 1}, {job.variant}")
                reports[job.variant].append(job.step())
                progress.advance(task)
        progress.update(task, description="ending the ranks")
        with daemon.oneshot():
            cpu, memory = daemon.cpu_times(), daemon.memory_info()
        cost = DaemonCost(
            cpu_seconds=cpu.user + cpu.system - idle_cpu.user - idle_cpu.system,
            memory_bytes=memory.rss - memory.shared,
        )
        for job in jobs:
            job.finish()
    return reports[PLAIN], reports[DISCOD], cost


def verdict(plain: Steps, discod: Steps) -> int:
    """The exit code; where the variants differ is said on standard error."""
    different = differences(plain, discod)
    for text in different[:DIFFERENCES_SHOWN]:
        print(f"not bit-equal: {text}", file=sys.stderr)
    if len(different) > DIFFERENCES_SHOWN:
        print(f"and {len(different) - DIFFERENCES_SHOWN} more", file=sys.stderr)
    return EXIT_DIFFERENT if different else 0


@click.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1))
@click.option(
    "--steps",
    default=4,
    show_default=True,
    type=click.IntRange(2),
    help="Steps of each variant; the first one warms up.",
)
@click.option("--layers", default=12, show_default=True, type=click.IntRange(4))
@click.option(
    "--rows",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Texts in each rank's batch.",
)
@click.option(
    "--length",
    default="4096",
    show_default=True,
    type=click.Choice(["256", "1024", "4096"]),
    help="Bytes in a text.",
)
@click.option(
    "--arena",
    default=0.25,
    show_default=True,
    type=click.FloatRange(0, 2),
    help="RAM that discod gets, as a share of the layer inputs.",
)
@click.option(
    "--scratch",
    default=Path(),
    show_default="the working directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="Where to make the temporary scratch directory: on the disk to use.",
)
def main(
    ranks: int, steps: int, layers: int, rows: int, length: str, arena: float, scratch: Path
) -> None:
    """Train a small GPT with plain checkpointing and with discod, and compare.

    Exits with 1 when a gradient, a parameter or a loss differs by a bit, and with 3 when a process
    fails.
    """
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    began = time.monotonic()
    try:
        with ending_on_signals(), Place(scratch) as place:
            settings = Settings(
                layers=layers,
                width=WIDTH,
                length=int(length),
                rows=rows,
                threads=max(1, (os.cpu_count() or 1) // ranks),
                arena_bytes=arena_bytes(arena, layers, rows * int(length) * WIDTH * 4),
                socket_dir=str(place.socket_dir),
            )
            plain, discod, cost = run(place, settings, ranks, steps, console)
    except DemoFailed as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    console.print(
        f"{ranks} ranks, {steps} steps each, {layers} layers, hidden states of "
        f"{format_size(settings.hidden_bytes)}; {time.monotonic() - began:.0f} s",
        highlight=False,
    )
    console.print(table(settings, plain, discod, cost))
    sys.exit(verdict(plain, discod))


if __name__ == "__main__":
    main()
