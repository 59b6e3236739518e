"""The rows as a table: on the terminal as they come, in Markdown, and in JSON with their data."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.runner import Line

MARKS = {True: "ok", False: "FAILED", None: "-"}
WIDTHS = (9, 62, 10)


def text(line: Line) -> str:
    """A row for the terminal: mark last, so that long words break nothing."""
    part, what, goal = (
        str(line[name]).ljust(width)
        for name, width in zip(("part", "what", "goal"), WIDTHS, strict=True)
    )
    return f"{MARKS[line['ok']]:6}  {part}  {what}  {goal}  {line['value']}"


def summary(lines: Sequence[Line]) -> str:
    """How many rows are which."""
    counts = Counter(line["ok"] for line in lines)
    return f"{counts[True]} ok, {counts[False]} failed, {counts[None]} without a goal"


def passed(lines: Sequence[Line]) -> bool:
    """Whether there are rows, and none of them failed."""
    return bool(lines) and all(line["ok"] is not False for line in lines)


def write(directory: Path, header: dict[str, str], lines: Sequence[Line]) -> None:
    """``results.json`` and ``results.md``."""
    results = {"header": header, "passed": passed(lines), "rows": list(lines)}
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (directory / "results.md").write_text(markdown(header, lines))


def markdown(header: dict[str, str], lines: Sequence[Line]) -> str:
    """The whole page."""
    cells = [
        [line["part"], line["what"], line["value"], line["goal"], MARKS[line["ok"]]]
        for line in lines
    ]
    return "\n".join(
        [
            "# On a GPU",
            "",
            *(f"- {name}: {value}" for name, value in header.items()),
            f"- rows: {summary(lines)}",
            "",
            *(_row(row) for row in (["part", "what", "value", "goal", "ok"], ["---"] * 5, *cells)),
            "",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    clean = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(clean)} |"
