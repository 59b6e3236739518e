"""``docs/benchmarks.md``, made of the JSON files beside it and of nothing else but this text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from discod.wire.sizes import format_size
from tests.benchmarks.frame import Benchmark

INTRODUCTION = """# Benchmarks

Made by `python -m tests.benchmarks` (`make bench`, `make bench-full`) from the JSON files in
`{folder}/`; do not edit. Every figure is from a real run on the machine that is named with it, and
nothing here was measured on a physical NVMe disk or with a GPU.

How to read it:

- The machines that this is developed on are shared, and their disk and cores wander by tens of
  percent. So every comparison alternates its systems within one run, a ratio is of figures of one
  round, and printed are the median of the ratios and, in brackets, least and greatest. Rates in
  GB/s say what scale a ratio is of, and are not to be compared between runs.
- All that is moved or computed is checked: bytes, counts of bytes, gradients.
- The client's figures include what fio and the probe do not do: the copy into the arena on the
  trainer's thread, checksums, and the messages, on the same cores.
- Growing the page cache or the heap is unusually slow on these machines, which flatters every ratio
  against a system that uses buffered files.
"""


def make(benchmarks: Sequence[Benchmark], folder: Path, notes: Path) -> str:
    """The page.

    Args:
        benchmarks: In the order of the page; those without a file are said not to have been run.
        folder: Of the JSON files and charts.
        notes: Where ``NAME.md`` may say what a benchmark's figures do not: above all, what keeps
            a goal from being met. ``demo.md`` comes last.
    """
    found = {b.name: load(folder / f"{b.name}.json") for b in benchmarks}
    parts = [INTRODUCTION.format(folder=folder.name), _peers(list(found.values()))]
    parts.append(_all_goals(benchmarks, found))
    for benchmark in benchmarks:
        whole = found[benchmark.name]
        parts.append(f"## {benchmark.title}\n")
        if whole is None:
            parts.append(f"Not run: `python -m tests.benchmarks {benchmark.name}` makes it.\n")
            continue
        parts.append(f"{_origin(whole)}\n")
        parts.append(benchmark.markdown(whole["result"]).strip() + "\n")
        for plot in benchmark.plots(whole["result"]):
            if (folder / f"{plot.name}.png").exists():
                parts.append(f"![{plot.title}]({folder.name}/{plot.name}.png)\n")
        parts.append(_goals(benchmark, whole["result"]))
        note = notes / f"{benchmark.name}.md"
        if note.exists():
            parts.append(note.read_text().strip() + "\n")
    last = notes / "demo.md"
    if last.exists():
        parts.append(last.read_text().strip() + "\n")
    return "\n".join(part for part in parts if part)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def load(path: Path) -> dict[str, Any] | None:
    """The file that a run wrote; None: it was not run."""
    if not path.exists():
        return None
    whole: dict[str, Any] = json.loads(path.read_text())
    return whole


def _origin(whole: dict[str, Any]) -> str:
    facts = whole["machine"]
    way = "O_DIRECT" if facts["direct"] else "buffered I/O"
    return (
        f"{whole['date']}, discod {facts['discod']}, {whole['form']} form, {whole['seconds']:.0f} "
        f"s. {facts['cores']} cores of {facts['cpu']}, {format_size(facts['memory_bytes'])}, "
        f"{facts['fs_type']} ({way}), Linux {facts['kernel']}, Python {facts['python']}, torch "
        f"{facts['torch']}."
    )


def _peers(runs: Sequence[dict[str, Any] | None]) -> str:
    last = next((whole for whole in reversed(runs) if whole is not None), None)
    if last is None:
        return ""
    rows = [[name, state] for name, state in last["machine"]["peers"].items()]
    return "What discod is measured against:\n\n" + table(["peer", "version"], rows)


def _all_goals(benchmarks: Sequence[Benchmark], found: dict[str, dict[str, Any] | None]) -> str:
    rows = []
    for benchmark in benchmarks:
        whole = found[benchmark.name]
        for goal in benchmark.goals(whole["result"]) if whole else ():
            rows.append([benchmark.name, goal.text, goal.figure, _met(goal.met)])
    if not rows:
        return ""
    return "## What it is to show\n\n" + table(["", "goal", "measured", ""], rows)


def _goals(benchmark: Benchmark, result: dict[str, Any]) -> str:
    missed = [goal for goal in benchmark.goals(result) if goal.met is False]
    if not missed:
        return ""
    return "".join(f"- **Missed:** {goal.text}: {goal.figure}.\n" for goal in missed)


def _met(met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: "not shown by this run"}[met]
