"""The policy: what it writes, reads and waits in simulation, over the least that is possible."""

from typing import Any

from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions
from tests.benchmarks.page import table
from tests.simulation.compare import as_json, compare
from tests.simulation.disk import Rates
from tests.simulation.traces import all_traces

MIB = 1 << 20
RATES = Rates(2.4e9, 1.8e9)
REGULAR = (
    *("plain", "plain, all fits", "plain, 90 % fits", "plain, 10 % fits", "accumulation", "DPO"),
    *("mixed sizes", "a blob kept for ever", "evaluation between steps"),
)
"""Traces of which the goal is judged: each step is as the last one, and last in is first out."""
GOAL_WRITTEN = 1.02
QUICK = ("plain", "accumulation", "DPO", "GRPO", "an order never the same")


class Policy:
    """See the module's text."""

    name = "policy"
    title = "The policy, in simulation"

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        rows = []
        for trace in all_traces():
            if options.full or trace.name in (*QUICK, *REGULAR):
                progress(trace.name)
                rows += [as_json(row) for row in compare(trace, RATES).values()]
        return {"rows": rows}

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        ours = [row for row in result["rows"] if row["policy"] == "discod"]
        regular = {
            row["trace"]: row["steady"]["written_over_least"]
            for row in ours
            if row["trace"] in REGULAR and row["steady"]["written_over_least"] is not None
        }
        needless = [
            row
            for row in ours
            if row["steady"]["written_over_least"] is None and row["steady"]["written_bytes"]
        ]
        watermark = {
            row["trace"]: row["first"] for row in result["rows"] if row["policy"] == "watermark"
        }
        colder = [
            row["trace"]
            for row in ours
            if row["first"]["written_bytes"] > watermark[row["trace"]]["written_bytes"] * 1.1
        ]
        return [
            Goal(
                f"bytes written at most {GOAL_WRITTEN} of what does not fit, once the order is "
                "known, on traces whose steps are alike",
                "; ".join(f"{name}: {ratio:.2f}" for name, ratio in regular.items()),
                max(regular.values()) <= GOAL_WRITTEN,
            ),
            Goal(
                "nothing written when all fits, once the order is known",
                "nothing" if not needless else ", ".join(row["trace"] for row in needless),
                not needless,
            ),
            Goal(
                "the first cycle writes no more than the watermark rule (within a tenth)",
                "on every trace" if not colder else "not on: " + ", ".join(colder),
                not colder,
            ),
        ]

    def markdown(self, result: dict[str, Any]) -> str:
        policies = list(dict.fromkeys(row["policy"] for row in result["rows"]))
        traces = dict.fromkeys(row["trace"] for row in result["rows"])
        of = {(row["trace"], row["policy"]): row for row in result["rows"]}
        rows = [
            [
                trace,
                _cell(of[trace, "discod"]["first"]),
                *(_cell(of[trace, policy]["steady"]) for policy in policies),
            ]
            for trace in traces
        ]
        header = ["trace", "discod, first cycle", "discod, later", *policies[1:]]
        return (
            "The client's own policy over a simulated disk (2.4 GB/s for writes, 1.8 for reads) "
            "and clock. A cell is *written / read / waited*: bytes over the least that is possible "
            "when the future is known, and the time waited over the time computed. "
            "[disk.md](disk.md#against-other-policies) says what the others are, and why some "
            "figures are above 1.\n\n" + table(header, rows)
        )

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        return []


def _cell(figures: dict[str, Any]) -> str:
    def over(ratio: float | None, size_bytes: int) -> str:
        return f"{size_bytes // MIB} MiB" if ratio is None else f"{ratio:.2f}"

    waited = figures["waited_seconds"] / figures["computed_seconds"]
    written = over(figures["written_over_least"], figures["written_bytes"])
    return f"{written} / {over(figures['read_over_least'], figures['read_bytes'])} / {waited:.1%}"
