"""What the ranks saw, judged: each cell is equal to what its form claims, raises, or differs."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tests.compatibility.forms import FORMS, PLAIN, Form
from tests.compatibility.matrix import ROWS
from tests.compatibility.rows import Row

Seen = dict[str, Any]
"""What one rank saw of one cell (``rank.measure``)."""


class Verdict(IntEnum):
    """Ordered: more is worse."""

    EQUAL = 0
    RAISES = 1
    DIFFERS = 2


@dataclass(frozen=True)
class Cell:
    """A judged cell.

    Attributes:
        detail: The error, or what differs.
        offloaded: Whether discod saved anything.
    """

    verdict: Verdict
    detail: str
    offloaded: bool


@dataclass(frozen=True)
class JudgedRow:
    """A row with a cell for each form, by the form's name."""

    row: Row
    cells: dict[str, Cell]


def judge(reports: list[dict[str, Any]]) -> list[JudgedRow]:
    """Judge the reports of all ranks (``rank``)."""
    return [_judge_row(row, [report["cells"][row.key] for report in reports]) for row in ROWS]


def _judge_row(row: Row, reports: list[dict[str, Seen]]) -> JudgedRow:
    return JudgedRow(row, {form.name: _judge_cell(row, form, reports) for form in FORMS})


def _judge_cell(row: Row, form: Form, reports: list[dict[str, Seen]]) -> Cell:
    own = [report[form.name] for report in reports]
    offloaded = all(seen["saved_bytes"] for seen in own)
    errors = {seen["error"] for seen in own}
    if len(errors) > 1:
        found = ", ".join(sorted(map(str, errors)))
        return Cell(Verdict.DIFFERS, f"the ranks raise differently: {found}", offloaded)
    (error,) = errors
    if error is not None:
        return Cell(Verdict.RAISES, error, offloaded)
    faults = [fault for seen in own for fault in seen["faults"]]
    for fault in (*_differences(row, form, reports), *faults):
        return Cell(Verdict.DIFFERS, fault, offloaded)
    return Cell(Verdict.EQUAL, "", offloaded)


def _differences(row: Row, form: Form, reports: list[dict[str, Seen]]) -> list[str]:
    """What is not as in the form's oracle, or not the same on all ranks."""
    own = [report[form.name]["steps"] for report in reports]
    gradients = [[step["gradients"] for step in steps] for steps in own]
    if row.same_gradients and any(other != gradients[0] for other in gradients):
        return ["the ranks' gradients are not the same"]
    if form.claims is None:
        return []
    oracle = _oracle(form, reports)
    if oracle is None:
        return ["no error, where training without checkpoints has one"]
    return [
        difference
        for steps, expected in zip(own, oracle, strict=True)
        for step, wanted in zip(steps, expected, strict=True)
        for difference in _step_differences(step, wanted)
    ]


def _oracle(form: Form, reports: list[dict[str, Seen]]) -> list[list[Seen]] | None:
    """The steps to be equal to: of the form that is claimed, or where that raises, without any."""
    for name in (form.claims, PLAIN):
        if all(report[name]["error"] is None for report in reports):
            return [report[name]["steps"] for report in reports]
    return None


def _step_differences(step: Seen, wanted: Seen) -> list[str]:
    if any(
        step["gradients"][name] is None and gradient is not None
        for name, gradient in wanted["gradients"].items()
    ):
        return ["gradients are missing"]
    return [f"{what} differ" for what in wanted if step[what] != wanted[what]]
