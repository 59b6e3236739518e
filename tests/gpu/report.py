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
    """How many rows are which; a figure is a row of which nothing is asked."""
    counts = Counter("left out" if line["left_out"] else line["ok"] for line in lines)
    figures = f"{counts[None]} figure{'' if counts[None] == 1 else 's'}"
    return f"{counts[True]} ok, {counts[False]} failed, {counts['left out']} left out, {figures}"


def passed(lines: Sequence[Line]) -> bool:
    """Whether something was checked, and nothing failed."""
    found = {line["ok"] for line in lines}
    return True in found and False not in found


def write(directory: Path, header: dict[str, str], lines: Sequence[Line], complete: bool) -> None:
    """``results.json`` and ``results.md``, each replaced as a whole; ``complete``: all has run."""
    results = {"header": header, "passed": complete and passed(lines), "rows": list(lines)}
    _replace(directory / "results.json", json.dumps(results, indent=1) + "\n")
    _replace(directory / "results.md", markdown(header, lines))


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


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
