"""The measured matrix as Markdown, and its place in ``docs/compatibility.md``."""

from pathlib import Path

from tests.compatibility.forms import FORMS
from tests.compatibility.matrix import TABLES
from tests.compatibility.verdicts import Cell, JudgedRow, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN = "<!-- measured: written by python -m tests.compatibility -->"
END = "<!-- end of what was measured -->"


def render(rows: list[JudgedRow]) -> str:
    """All tables, and the texts of the errors in them."""
    errors: list[str] = []
    tables = [_forms(), *(_table(name, rows, errors) for name in TABLES)]
    if errors:
        tables.append("\n".join(["The errors:", "", *_numbered(errors)]))
    return "\n\n".join(tables)


def measured_part(text: str) -> str:
    """What stands between the marks in the page's ``text``."""
    return _split(text)[1].strip()


def with_measured_part(text: str, tables: str) -> str:
    """The page's ``text`` with ``tables`` between the marks."""
    before, _, after = _split(text)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _split(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    measured, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has not both marks: {BEGIN} and {END}")
    return before, measured, after


def _forms() -> str:
    lines = [_line(["form", "code", "claims to be equal to", "recomputes"]), _line(["---"] * 4)]
    for form in FORMS:
        recomputes = "yes" if form.recomputes else "no"
        lines.append(_line([form.name, f"`{form.usage}`", form.claims or "", recomputes]))
    return "\n".join(["### The forms", "", *lines])


def _table(name: str, rows: list[JudgedRow], errors: list[str]) -> str:
    header = ["model", "setting", *(form.name for form in FORMS)]
    lines = [f"### {name}", "", _line(header), _line(["---"] * len(header))]
    for judged in rows:
        if judged.row.table == name:
            cells = [_text(judged.cells[form.name], errors) for form in FORMS]
            lines.append(_line([judged.row.model, judged.row.setting, *cells]))
    return "\n".join(lines)


def _text(cell: Cell, errors: list[str]) -> str:
    if cell.verdict is Verdict.RAISES:
        if cell.detail not in errors:
            errors.append(cell.detail)
        return f"raises ({errors.index(cell.detail) + 1})"
    if cell.verdict is Verdict.DIFFERS:
        return f"**{cell.detail}**"
    return "equal"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _numbered(errors: list[str]) -> list[str]:
    return [f"{number}. `{error}`" for number, error in enumerate(errors, 1)]
