"""The training step: discod against plain checkpointing, ``save_on_cpu`` and Axolotl's ``Disco``.

Which legs are run (:mod:`tests.benchmarks.legs`), and what their results say.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from discod.wire.sizes import format_size
from tests.benchmarks import axolotl_disco
from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions
from tests.benchmarks.legs import Bench, Leg
from tests.benchmarks.spread import show, spread
from tests.benchmarks.systems import (
    ATTACHED,
    AXOLOTL,
    COPIES,
    DISCOD,
    DISCOD_DISCO,
    FITS,
    PLAIN,
    REENTRANT,
    SAVE_ON_CPU,
    WITH_ARENA,
)
from tests.benchmarks.workloads import GPT_LENGTH, GPT_WIDTH, Workload

MIB = 1 << 20
WORKLOADS = {
    "I/O-heavy": Workload(layers=32, hidden_bytes=32 * MIB, width=256, inner=16),
    "I/O-heavy, 2 ranks": Workload(layers=24, hidden_bytes=16 * MIB, width=256, inner=16, ranks=2),
    "compute-heavy": Workload(layers=12, hidden_bytes=4 * MIB, width=512, inner=2048),
    "compute-heavy, 2 ranks": Workload(
        layers=12, hidden_bytes=4 * MIB, width=512, inner=2048, ranks=2
    ),
    "GPT": Workload(
        layers=32, hidden_bytes=8 * GPT_LENGTH * GPT_WIDTH * 4, width=GPT_WIDTH, inner=0
    ),
    "4 GiB": Workload(layers=32, hidden_bytes=128 * MIB, width=256, inner=16),
    "I/O-heavy, half": Workload(layers=16, hidden_bytes=32 * MIB, width=256, inner=16),
}
"""One rank each, unless the name says otherwise."""

OURS = (PLAIN, REENTRANT, DISCOD, DISCOD_DISCO)
PEERS = (*OURS, AXOLOTL)
ALL = (*PEERS, SAVE_ON_CPU)
CONTROLS = (PLAIN, COPIES, FITS, DISCOD)

GOAL_SHARE = 0.3
GOAL_RATIOS = {
    "I/O-heavy": 1.12,
    "I/O-heavy, 2 ranks": 1.12,
    "compute-heavy": 1.02,
    "compute-heavy, 2 ranks": 1.02,
}
GOAL_WRITTEN = 1.02

QUICK = (
    Leg("I/O-heavy", 0.3, "warm", (*OURS, COPIES, FITS), rounds=3, steps=1),
    Leg("I/O-heavy, half", 0.3, "default", (REENTRANT, DISCOD_DISCO, AXOLOTL), rounds=1, steps=1),
    Leg("I/O-heavy, 2 ranks", 0.3, "warm", OURS, rounds=3, steps=1),
    Leg("compute-heavy", 0.3, "warm", OURS, rounds=2, steps=1),
)
FULL = (
    Leg("I/O-heavy", 1.0, "warm", OURS, rounds=3, steps=1),
    Leg("I/O-heavy", 0.5, "warm", OURS, rounds=3, steps=1),
    Leg("I/O-heavy", 0.3, "warm", (*ALL, COPIES, FITS), rounds=5, steps=2),
    Leg("I/O-heavy", 0.25, "warm", OURS, rounds=3, steps=1),
    Leg("I/O-heavy", 0.1, "warm", OURS, rounds=3, steps=1),
    Leg("I/O-heavy", 0.3, "default", (REENTRANT, DISCOD_DISCO, AXOLOTL), rounds=2, steps=1),
    Leg("I/O-heavy, 2 ranks", 0.3, "warm", PEERS, rounds=5, steps=2),
    Leg("compute-heavy", 0.3, "warm", PEERS, rounds=4, steps=1),
    Leg("compute-heavy, 2 ranks", 0.3, "warm", OURS, rounds=3, steps=1),
    Leg("GPT", 0.3, "warm", (PLAIN, DISCOD), rounds=2, steps=1),
    Leg("4 GiB", 0.1, "default", (PLAIN, DISCOD), rounds=1, steps=1),
)


class Training:
    """The benchmark."""

    name = "training"
    title = "Training step"

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        """All legs of the form that is wanted; without Axolotl's where it is not installed.

        Raises:
            WrongBytes, WorkerFailed: As :meth:`Bench.run`.
        """
        return self.run_legs(FULL if options.full else QUICK, WORKLOADS, options, progress)

    def run_legs(
        self,
        legs: Sequence[Leg],
        workloads: dict[str, Workload],
        options: RunOptions,
        progress: Progress,
    ) -> dict[str, Any]:
        """As :meth:`run`, of given legs."""
        missing = {}
        try:
            axolotl_disco.find()
        except axolotl_disco.NotInstalled as error:
            missing[AXOLOTL] = str(error)
        with Bench(options.directory) as bench:
            return {
                "missing": missing,
                "legs": [
                    bench.run(leg.without(missing), workloads[leg.workload], progress)
                    for leg in legs
                ],
            }

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        """The step's time, peak memory and bytes written."""
        return [*_step_goals(result), *_memory_goals(result), _written_goal(result)]

    def markdown(self, result: dict[str, Any]) -> str:
        """A table for each leg."""
        parts = [
            f"{system} could not be run: {reason}.\n"
            for system, reason in result["missing"].items()
        ]
        tables = (_table(leg) + _rest(leg) for leg in result["legs"])
        return "\n".join([*parts, *tables])

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        """Step time by the arena's share, where there are several."""
        legs = sorted(_legs(result, "I/O-heavy", "warm"), key=lambda leg: leg["leg"]["share"])
        if len(legs) < 2:
            return []
        series = {
            system: [
                (leg["leg"]["share"] * 100, median(leg["systems"][system]["ratios"]))
                for leg in legs
            ]
            for system in WITH_ARENA
        }
        return [
            Plot(
                name="training-arena",
                title="I/O-heavy model: step over plain checkpointing",
                x_label="arena, % of the activations",
                y_label="step over plain checkpointing",
                series=series,
                reference=1.0,
            )
        ]


def _legs(result: dict[str, Any], workload: str, malloc: str) -> Iterator[dict[str, Any]]:
    for leg in result["legs"]:
        if (leg["leg"]["workload"], leg["leg"]["malloc"]) == (workload, malloc):
            yield leg


def _step_goals(result: dict[str, Any]) -> Iterator[Goal]:
    for workload, limit in GOAL_RATIOS.items():
        for system in WITH_ARENA:
            found = [
                spread(leg["systems"][system]["ratios"])
                for leg in _legs(result, workload, "warm")
                if leg["leg"]["share"] == GOAL_SHARE and system in leg["systems"]
            ]
            yield Goal(
                f"{system}, {workload}: step over plain checkpointing at an arena of "
                f"{GOAL_SHARE:.0%} at most {limit}",
                show(found[0]) if found else "not measured",
                found[0]["median"] <= limit if found else None,
            )


def _memory_goals(result: dict[str, Any]) -> Iterator[Goal]:
    """With malloc as it is by default: a warm heap's peak says how fragmented it is."""
    for leg in result["legs"]:
        systems = leg["systems"]
        if AXOLOTL not in systems or leg["leg"]["malloc"] != "default":
            continue
        for system in (name for name in WITH_ARENA if name in systems):
            ours, theirs = systems[system]["peak_bytes"], systems[AXOLOTL]["peak_bytes"]
            yield Goal(
                f"{system}, {_name(leg)}: peak memory lower than Axolotl's with its page cache",
                f"{format_size(ours)} and {format_size(theirs)}",
                ours < theirs,
            )


def _written_goal(result: dict[str, Any]) -> Goal:
    """The worst of all."""
    shares = []
    for leg in result["legs"]:
        for system in set(WITH_ARENA) & leg["systems"].keys():
            figures = leg["systems"][system]
            if figures["overflow_bytes"]:
                shares.append(figures["written_bytes"] / figures["overflow_bytes"])
            elif figures["written_bytes"]:
                shares.append(float("inf"))
    worst = max(shares, default=None)
    return Goal(
        f"bytes written at most {GOAL_WRITTEN} of those that do not fit, and none when all fit",
        "not measured" if worst is None else f"{worst:.3f} at worst",
        None if worst is None else worst <= GOAL_WRITTEN,
    )


def _name(leg: dict[str, Any]) -> str:
    share, malloc = leg["leg"]["share"], leg["leg"]["malloc"]
    return f"{leg['leg']['workload']}, arena {share:.0%}, malloc {malloc}"


HEADER = (
    "| | step, s | over its plain form | peak memory | written / does not fit "
    "| read | waited, s | daemon CPU, s |\n|---|---|---|---|---|---|---|---|\n"
)


def _table(leg: dict[str, Any]) -> str:
    workload = leg["workload"]
    head = (
        f"**{_name(leg)}**: {workload['layers']} x {format_size(workload['hidden_bytes'])}, "
        f"{format_size(leg['activation_bytes'])} of activations and "
        f"{format_size(leg['arena_bytes'])} of arena for each rank\n\n"
    )
    rows = [_row(system, figures) for system, figures in leg["systems"].items()]
    return head + HEADER + "".join(rows)


def _row(system: str, figures: dict[str, Any]) -> str:
    cells = [
        system,
        f"{median(figures['seconds']):.2f}",
        show(spread(figures["ratios"])),
        format_size(figures["peak_bytes"]),
    ]
    if system in ATTACHED:
        written, overflow = figures["written_bytes"], figures["overflow_bytes"]
        cells += [
            f"{format_size(written)} / {format_size(overflow)}",
            format_size(figures["read_bytes"]),
            f"{figures['save_wait_seconds'] + figures['load_wait_seconds']:.3f}",
            f"{figures['daemon_cpu_seconds']:.2f}",
        ]
    elif system == AXOLOTL:
        reached = figures["write_bytes"] - figures["cancelled_write_bytes"]
        cells[-1] += f", {_cache(figures['cache_bytes'])} of it page cache"
        cells += [
            f"{format_size(int(figures['write_bytes']))} to the page cache, "
            f"{format_size(max(0, int(reached)))} of it to a device",
            format_size(int(figures["read_bytes"])),
            "",
            "",
        ]
    else:
        cells += ["", "", "", ""]
    return "| " + " | ".join(cells) + " |\n"


def _rest(leg: dict[str, Any]) -> str:
    """Where the step of discod's goes, by the controls that took turns with it."""
    systems = leg["systems"]
    if not set(CONTROLS) <= systems.keys():
        return ""
    parts = {
        "the copies into memory of the arena's kind": (COPIES, PLAIN),
        "discod's own work: bookkeeping, the arena's pages in place of the heap's": (FITS, COPIES),
        "what the disk's part takes of cores and memory, and waits": (DISCOD, FITS),
    }
    text = "\nWhere the rest of the step goes, as shares of a plain step, by rounds:\n\n"
    text += "| | |\n|---|---|\n"
    for what, (more, less) in parts.items():
        pairs = zip(systems[more]["ratios"], systems[less]["ratios"], strict=True)
        text += f"| {what} | {show(spread([a - b for a, b in pairs]))} |\n"
    return text


def _cache(cache_bytes: int | None) -> str:
    return "an unknown part" if cache_bytes is None else format_size(cache_bytes)
