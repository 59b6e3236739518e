"""What a benchmark is, and how several are run: each by itself, one that fails stops no other.

A benchmark checks what it moves or computes, alternates the systems that it compares within one
run, and returns plain data. The page and the plots are made of that data alone, so that what is
published can be made again from the files beside it.
"""

import json
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from discod import __version__
from discod.storage import Directory
from tests.benchmarks import peers

Progress = Callable[[str], None]


class WrongBytes(Exception):
    """The benchmark's data or byte counts are wrong: its figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    Attributes:
        directory: On the file system to measure; everything in it is temporary.
        full: All sizes and systems, for the published page; else a choice that is soon done.
    """

    directory: Path
    full: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """Something a benchmark must show.

    Attributes:
        text: What, with its limit.
        figure: What was measured.
        met: Whether it is; None where this run could not tell.
    """

    text: str
    figure: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Plot:
    """A bar or line chart.

    Attributes:
        name: Of its file, without suffix.
        title, x_label, y_label: What it says.
        series: Name to points; ``x`` is a number (lines) or a word (bars beside one another).
        reference: Where to draw a line across, as the ratio 1.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float | str, float]]]
    reference: float | None = None
    logarithmic_x: bool = False


class Benchmark(Protocol):
    """One file's worth of measurements."""

    name: str
    """Of its files, and on the command line."""
    title: str
    """Of its part of the page."""

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        """Measure; plain data, for JSON. Raises :class:`WrongBytes` when a check fails."""

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        """What it must show."""

    def markdown(self, result: dict[str, Any]) -> str:
        """How it was measured, and the tables, without the title."""

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        """Its charts."""


@dataclass(slots=True)
class Report:
    """What came of a run: names of the benchmarks that ran, and why others failed."""

    ran: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run_all(
    benchmarks: Sequence[Benchmark], options: RunOptions, out: Path, progress: Progress
) -> Report:
    """Run each benchmark and write its ``NAME.json`` to ``out``."""
    report = Report()
    out.mkdir(parents=True, exist_ok=True)
    facts = machine(options.directory)
    for benchmark in benchmarks:
        began = time.monotonic()
        try:
            result = benchmark.run(options, partial(_tell, progress, benchmark.name))
        except Exception as error:  # noqa: BLE001  the others go on; the exit code tells
            traceback.print_exc()
            report.failed[benchmark.name] = f"{type(error).__name__}: {error}"
            continue
        whole = {
            "benchmark": benchmark.name,
            "date": time.strftime("%Y-%m-%d"),
            "form": "full" if options.full else "quick",
            "seconds": round(time.monotonic() - began, 1),
            "machine": facts,
            "result": result,
        }
        (out / f"{benchmark.name}.json").write_text(json.dumps(whole, indent=1) + "\n")
        report.ran.append(benchmark.name)
    return report


def _tell(progress: Progress, name: str, text: str) -> None:
    progress(f"{name}: {text}")


def machine(directory: Path) -> dict[str, Any]:
    """What the figures are taken on, and with which peers."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        scratch = Directory(Path(folder))
        fs_type, direct = scratch.fs_type, scratch.direct
        scratch.close()
    return {
        "discod": __version__,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "fs_type": fs_type,
        "direct": direct,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peers": peers.versions(),
    }
