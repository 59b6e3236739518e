"""What a benchmark is to the suite."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    Attributes:
        directory: On the file system to measure; everything in it is temporary.
        full: Take the time that good figures need.
    """

    directory: Path
    full: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """What the benchmark should show. ``met``: None when it was not measured."""

    text: str
    figure: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot, with the spread of each point."""

    label: str
    x: list[float]
    y: list[float]
    least: list[float]
    greatest: list[float]


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over a common axis; ``name`` is the file's, without its suffix."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]


class Benchmark(Protocol):
    """One of the suite's; everything but ``run`` works on results read from JSON."""

    name: str
    title: str

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        """Measure."""

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        """Which goals are met."""

    def markdown(self, result: dict[str, Any]) -> str:
        """The tables."""

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        """The plots."""
