"""Charts as PNG, by matplotlib, which only the benchmarks' own environment has."""

import importlib.util
from pathlib import Path
from typing import Any

from tests.benchmarks.frame import Plot


def can_draw() -> bool:
    """Whether matplotlib is installed here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(plot: Plot, folder: Path) -> Path:
    """Draw ``plot`` into ``folder``; the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    if any(isinstance(x, str) for points in plot.series.values() for x, _ in points):
        _bars(plot, axes)
    else:
        for name, points in plot.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        if plot.logarithmic_x:
            axes.set_xscale("log", base=2)
    if plot.reference is not None:
        axes.axhline(plot.reference, color="gray", linewidth=0.8, linestyle="--")
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_ylim(bottom=0)
    if len(plot.series) > 1:
        axes.legend(fontsize="small")
    path = folder / f"{plot.name}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _bars(plot: Plot, axes: Any) -> None:
    words = list(dict.fromkeys(str(x) for points in plot.series.values() for x, _ in points))
    width = 0.8 / len(plot.series)
    for number, (name, points) in enumerate(plot.series.items()):
        places = [words.index(str(x)) + (number + 0.5) * width - 0.4 for x, _ in points]
        axes.bar(places, [y for _, y in points], width=width, label=name)
    axes.set_xticks(range(len(words)), words)
