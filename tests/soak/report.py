"""What a soak showed: a verdict, the figures, a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.helpers.plot import Curve, Panel, svg
from tests.soak.flat import climb, growth
from tests.soak.procfs import Sample
from tests.soak.run import Outcome, Plan

MIB = 1 << 20

MOST_GROWTH_BYTES = {"daemon": 4 * MIB, "trainer": 16 * MIB}
"""Of a process's own memory, from the warm-up to the end.

A daemon allocates little but small objects, for many thousand requests a minute. A trainer is
looked at when it holds nothing; one of its largest tensors that is never freed would be noticed.
"""

MOST_CLIMB = {"fds": 6, "threads": 1, "maps": 16}
"""A visitor that is there at one median and not at the other is five fds and some mappings of the
daemon's; glibc keeps some mappings of freed memory. A leak in each visit would be hundreds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One measure of one process.

    Attributes:
        grown: From the warm-up to the end, in the measure's unit.
        most: What is allowed.
    """

    process: str
    measure: str
    first: int
    last: int
    grown: int
    most: int

    @property
    def flat(self) -> bool:
        return self.grown <= self.most


def verdicts(samples: Mapping[str, Sequence[Sample]]) -> list[Verdict]:
    """Of each process, each measure."""
    found = []
    for process, series in samples.items():
        kind = process.split()[0]
        points = [(each.seconds, each.anon_bytes) for each in series]
        grown, most = round(growth(points)), MOST_GROWTH_BYTES[kind]
        ends = series[len(series) // 4], series[-1]
        found.append(
            Verdict(process, "anon_bytes", ends[0].anon_bytes, ends[1].anon_bytes, grown, most)
        )
        for measure, most in MOST_CLIMB.items():
            values = [int(getattr(each, measure)) for each in series]
            first = values[len(values) // 4]
            found.append(Verdict(process, measure, first, values[-1], climb(values), most))
    return found


def problems(outcome: Outcome) -> list[str]:
    """Why the soak failed; empty when it did not."""
    found = [
        f"{v.process}: {v.measure} grew by {v.grown} (at most {v.most} is flat)"
        for v in verdicts(outcome.samples)
        if not v.flat
    ]
    for name, done in outcome.done.items():
        if done.get("wrong"):
            found.append(f"{name}: {done['wrong']} results differ from what was saved")
        if name != "visitors" and done.get("live_blobs"):
            found.append(f"{name}: {done['live_blobs']} blobs were left alive")
    found += [f"left behind: {name}: {what}" for name, what in outcome.left.items()]
    return found


def table(outcome: Outcome) -> str:
    """The verdicts as Markdown."""
    lines = [
        "| process | measure | after warm-up | at the end | grown | allowed |",
        "|---|---|---|---|---|---|",
    ]
    for v in verdicts(outcome.samples):
        shown = [v.first, v.last, v.grown, v.most]
        if v.measure == "anon_bytes":
            cells = [f"{value / MIB:.1f} MiB" for value in shown]
        else:
            cells = [str(value) for value in shown]
        name = "memory of its own" if v.measure == "anon_bytes" else v.measure
        lines.append(f"| {v.process} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json(plan: Plan, outcome: Outcome) -> str:
    """All of it, samples too."""
    document = asdict(outcome) | {"plan": asdict(plan), "problems": problems(outcome)}
    return json.dumps(document, indent=1)


def picture(outcome: Outcome) -> str:
    """Memory and scratch over time, as SVG."""

    def curve(name: str, points: Sequence[tuple[float, float]]) -> Curve:
        return Curve(name, [(seconds / 60, value / MIB) for seconds, value in points])

    memory = [
        curve(name, [(each.seconds, each.anon_bytes) for each in series])
        for name, series in outcome.samples.items()
    ]
    scratch = [curve("scratch in use", outcome.disk)]
    fds = [
        Curve(name, [(each.seconds / 60, each.fds) for each in series])
        for name, series in outcome.samples.items()
    ]
    return svg(
        [
            Panel("Memory of its own, MiB", "minutes", memory),
            Panel("Scratch in use, MiB", "minutes", scratch),
            Panel("File descriptors", "minutes", fds),
        ]
    )
