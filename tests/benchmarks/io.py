"""``make bench-io``: saving and loading through the client's API, against fio and a bare probe.

All on one file system, in one run, alternating; only ratios within a round mean anything, for the
rates of a disk wander. Printed are medians over the rounds, and the least and greatest.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil
import torch
from rich.console import Console
from rich.table import Table

import disco_client
from discod import __version__
from discod.wire.sizes import format_size, parse_size
from tests.benchmarks.cycles import CallTimes, Cycles, Phase, WrongBytes
from tests.benchmarks.reference import FIO_PACKAGE, Fio, Probe, Reference
from tests.helpers.daemon import Daemon

GOAL_BLOB_BYTES = 16 << 20
GOAL_RATIO = 0.9
GOAL_CPU_SECONDS_PER_GB = 0.06
GOAL_SAVE_OVER_MEMCPY_SECONDS = 150e-6
WARM_UP_CYCLES = 2
"""The first one makes extents and huge pages, without knowing the order; the second knows it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        directory: On the file system to measure.
        blob_bytes: Sizes of the blobs.
        data_bytes: Bytes saved in each cycle, and size of the references' files.
        arena_bytes: Small beside ``data_bytes``, so that most of it goes through the disk.
    """

    directory: Path
    blob_bytes: Sequence[int]
    data_bytes: int
    arena_bytes: int
    rounds: int
    fio_jobs: int = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the range around it."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(slots=True)
class Direction:
    """All rounds of writing, or of reading."""

    phases: list[Phase] = field(default_factory=list)
    references: dict[str, list[float]] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        """Rates in bytes per second, ratios to each reference, the daemon's CPU-s/GB."""
        rates = [phase.rate for phase in self.phases]
        moved = sum(phase.disk_bytes for phase in self.phases)
        return {
            "bytes_per_second": asdict(Spread.of(rates)),
            "references": {
                name: {
                    "bytes_per_second": asdict(Spread.of(values)),
                    "ratio": asdict(Spread.of([a / b for a, b in zip(rates, values, strict=True)])),
                }
                for name, values in self.references.items()
            },
            "daemon_cpu_seconds_per_gb": sum(p.daemon_cpu_seconds for p in self.phases)
            / (moved / 1e9),
        }


def measure(
    options: Options, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Run everything; the results, ready for JSON.

    Raises:
        WrongBytes: What was loaded is not what was saved, or the counts do not add up.
    """
    with ExitStack() as cleanup:
        scratch = Path(
            cleanup.enter_context(
                tempfile.TemporaryDirectory(prefix="discod-bench-", dir=options.directory)
            )
        )
        sockets = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="discod-bench-")))
        (scratch / "discod").mkdir()
        daemon = Daemon(
            scratch=scratch / "discod", socket_dir=sockets, log_path=sockets / "daemon.log"
        )
        cleanup.callback(daemon.close)
        daemon.wait_until_ready()
        references: list[Reference] = [Probe(scratch / "probe", options.data_bytes)]
        cleanup.callback(references[0].close)
        if Fio.version() is not None:
            references.insert(0, Fio(scratch / "fio", options.data_bytes, options.fio_jobs))
        for reference in references:
            reference.write()
        disco_client.connect(sockets, arena=options.arena_bytes)
        cleanup.callback(disco_client.close)
        results = [
            measure_size(size, options, daemon, references, progress) for size in options.blob_bytes
        ]
        check_daemon(daemon)
        return {"machine": machine(daemon), "options": _plain(options), "sizes": results}


def measure_size(
    blob_bytes: int,
    options: Options,
    daemon: Daemon,
    references: Sequence[Reference],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """All rounds with one size of blobs."""
    blobs = options.data_bytes // blob_bytes
    cycles = Cycles(blob_bytes, blobs, options.arena_bytes, daemon.pid)
    writes, reads, calls = Direction(), Direction(), CallTimes()
    for warm_up in range(WARM_UP_CYCLES):
        progress(f"{format_size(blob_bytes)}: warming up")
        cycles.write()
        cycles.read(check_all=warm_up == 0)
    for number in range(options.rounds):
        progress(f"{format_size(blob_bytes)}: round {number + 1} of {options.rounds}")
        first, second = references[::2], references[1::2]
        if number % 2:
            first, second = second, first
        for reference in first:
            writes.references.setdefault(reference.name, []).append(reference.write())
        writes.phases.append(cycles.write())
        for reference in second:
            writes.references.setdefault(reference.name, []).append(reference.write())
        for reference in first:
            reads.references.setdefault(reference.name, []).append(reference.read())
        reads.phases.append(cycles.read())
        for reference in second:
            reads.references.setdefault(reference.name, []).append(reference.read())
    progress(f"{format_size(blob_bytes)}: timing single calls")
    cycles.time_calls(calls)
    cycles.close()
    return {
        "blob_bytes": blob_bytes,
        "blobs": blobs,
        "write": writes.result(),
        "read": reads.result(),
        "calls_seconds": {name: asdict(Spread.of(v)) for name, v in asdict(calls).items()},
    }


def check_daemon(daemon: Daemon) -> None:
    """The daemon has moved the bytes that the client says it has. Raises :class:`WrongBytes`."""
    (client,) = daemon.status()["clients"]
    stats = disco_client.stats()
    for name in ("written_bytes", "read_bytes"):
        if client[name] != getattr(stats, name):
            raise WrongBytes(f"{name}: {client[name]} by the daemon, {getattr(stats, name)} here")


def machine(daemon: Daemon) -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    scratch = daemon.status()["scratch"][0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "discod": __version__,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "fs_type": scratch["fs_type"],
        "direct": scratch["direct"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fio": Fio.version(),
    }


def _plain(options: Options) -> dict[str, Any]:
    result = asdict(options)
    result["directory"] = str(options.directory)
    return result


def table(results: dict[str, Any]) -> Table:
    """The ratios, and what they are made of."""
    names = list(results["sizes"][0]["write"]["references"])
    result = Table(title="discod over the references", title_justify="left")
    result.add_column("blobs", justify="right")
    result.add_column("")
    for name in names:
        result.add_column(f"over {name}", justify="right")
    for header in ("GB/s", *names, "daemon CPU-s/GB"):
        result.add_column(header, justify="right")
    for size in results["sizes"]:
        for direction in ("write", "read"):
            row = size[direction]
            references = [row["references"][name] for name in names]
            result.add_row(
                format_size(size["blob_bytes"]) if direction == "write" else "",
                direction,
                *(_spread(reference["ratio"]) for reference in references),
                f"{row['bytes_per_second']['median'] / 1e9:.2f}",
                *(f"{r['bytes_per_second']['median'] / 1e9:.2f}" for r in references),
                f"{row['daemon_cpu_seconds_per_gb']:.3f}",
            )
    return result


def calls_table(results: dict[str, Any]) -> Table:
    """What single calls cost the trainer's thread."""
    result = Table(
        "blobs",
        "save, ms",
        "memcpy, ms",
        "save over memcpy, us",
        "of it CPU, us",
        "load hit, us",
        title="single calls, medians",
        title_justify="left",
    )
    for column in result.columns:
        column.justify = "right"
    for size in results["sizes"]:
        calls = {name: spread["median"] for name, spread in size["calls_seconds"].items()}
        result.add_row(
            format_size(size["blob_bytes"]),
            f"{calls['save'] * 1e3:.2f}",
            f"{calls['memcpy'] * 1e3:.2f}",
            f"{(calls['save'] - calls['memcpy']) * 1e6:.0f}",
            f"{(calls['save_cpu'] - calls['memcpy_cpu']) * 1e6:.0f}",
            f"{calls['load_hit'] * 1e6:.0f}",
        )
    return result


def goals(results: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each goal in words with its figure, and whether it is met; at 16 MiB, if that was run."""
    found = []
    for size in results["sizes"]:
        if size["blob_bytes"] != GOAL_BLOB_BYTES:
            continue
        for direction in ("write", "read"):
            row = size[direction]
            for name in ("fio", "probe"):
                if name in row["references"]:
                    ratio = row["references"][name]["ratio"]["median"]
                    text = f"{direction} {ratio:.2f} of {name}, at least {GOAL_RATIO}"
                    found.append((text, ratio >= GOAL_RATIO))
            cpu = row["daemon_cpu_seconds_per_gb"]
            text = f"{direction} {cpu:.3f} daemon CPU-s/GB, at most {GOAL_CPU_SECONDS_PER_GB}"
            found.append((text, cpu <= GOAL_CPU_SECONDS_PER_GB))
        calls = size["calls_seconds"]
        over = calls["save"]["median"] - calls["memcpy"]["median"]
        limit = GOAL_SAVE_OVER_MEMCPY_SECONDS
        text = f"save call {over * 1e6:.0f} us over memcpy, at most {limit * 1e6:.0f}"
        found.append((text, over <= limit))
    return found


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['least']:.2f}-{values['greatest']:.2f})"


@click.command()
@click.option(
    "--directory",
    default=Path(),
    show_default="the working directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="On the disk to measure; all files in it are temporary.",
)
@click.option(
    "--blobs", default="1MiB,4MiB,16MiB,64MiB", show_default=True, help="Sizes, by commas."
)
@click.option("--data", default="1.5GiB", show_default=True, help="Saved in each cycle.")
@click.option("--arena", default="256MiB", show_default=True, help="The client's RAM.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--fio-jobs", default=4, show_default=True, type=click.IntRange(1))
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write everything to this file too.",
)
def main(
    directory: Path,
    blobs: str,
    data: str,
    arena: str,
    rounds: int,
    fio_jobs: int,
    json_path: Path | None,
) -> None:
    """Measure saving and loading through discod against what the disk can do without it."""
    torch.set_num_threads(1)  # as torchrun sets it for every rank
    console = Console(width=None if sys.stdout.isatty() else 120)
    if Fio.version() is None:
        console.print(
            f"fio is not installed (package {FIO_PACKAGE}): the bare probe is the only reference"
        )
    options = Options(
        directory=directory,
        blob_bytes=tuple(parse_size(size) for size in blobs.split(",")),
        data_bytes=parse_size(data),
        arena_bytes=parse_size(arena),
        rounds=rounds,
        fio_jobs=fio_jobs,
    )
    with console.status("starting") as status:
        results = measure(options, progress=status.update)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2) + "\n")
    console.print(table(results))
    console.print(calls_table(results))
    for text, met in goals(results):
        console.print(f"{'met   ' if met else 'MISSED'}  {text}", highlight=False)


if __name__ == "__main__":
    main()
