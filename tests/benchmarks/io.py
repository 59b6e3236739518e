"""I/O: whole cycles through the client's API, against fio, a bare probe and other engines.

All on one file system, in one run. In each round the references run before and after discod's own
phase, in turns, and a round's ratio is to the mean of those around it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discod.wire.sizes import format_size
from tests.benchmarks import engines, peers
from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions
from tests.benchmarks.page import table
from tests.benchmarks.ranks import Ranks, Together
from tests.benchmarks.reference import Fio, Probe, Reference
from tests.benchmarks.service import service
from tests.benchmarks.spread import ratios, show, spread

MIB = 1 << 20
DIRECTIONS = ("write", "read", "mixed")
GOAL_SIZES = (8 * MIB, 64 * MIB)
GOAL_RATIO = 0.97
GOAL_CPU = 0.04


@dataclass(frozen=True, slots=True)
class Case:
    """What one table row is about.

    Attributes:
        blob_bytes, ranks: Of discod's side.
        data_bytes: Saved in each cycle, by all ranks.
        rounds: How many.
        checksum: The daemon's.
    """

    blob_bytes: int
    ranks: int
    data_bytes: int
    rounds: int
    checksum: str = "sampled"

    @property
    def blobs(self) -> int:
        """Of each rank."""
        return max(4, self.data_bytes // self.ranks // self.blob_bytes)

    @property
    def arena_bytes(self) -> int:
        """Of each rank: a sixth of its data, so that most of it goes through the disk."""
        return max(3 * self.blob_bytes, self.blobs * self.blob_bytes // 6, 8 * MIB)


def cases(full: bool) -> list[Case]:
    """What to measure."""
    if not full:
        return [
            *(Case(size * MIB, 1, 1024 * MIB, 3) for size in (1, 16, 64)),
            Case(16 * MIB, 2, 1024 * MIB, 3),
            Case(16 * MIB, 1, 1024 * MIB, 2, "full"),
        ]
    sizes = [
        Case(max(64 << 10, int(size * MIB)), 1, 256 * MIB if size < 1 else 1536 * MIB, 5)
        for size in (1 / 16, 1 / 4, 1, 4, 8, 16, 64, 256)
    ]
    return [
        *sizes,
        Case(1024 * MIB, 1, 6 << 30, 3),
        *(Case(16 * MIB, ranks, 1536 * MIB, 5) for ranks in (2, 4, 8)),
        *(Case(64 * MIB, ranks, 3 << 30, 3) for ranks in (2, 4)),
        *(Case(16 * MIB, 1, 1536 * MIB, 5, checksum) for checksum in ("full", "off")),
    ]


class Io:
    """See the module's text."""

    name = "io"
    title = "I/O: saving and loading against fio and other engines"

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        chosen = cases(options.full)
        return measure(chosen, options.directory, progress, with_engines=options.full)

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        found = []
        rows = [
            row
            for row in result["cases"]
            if GOAL_SIZES[0] <= row["blob_bytes"] <= GOAL_SIZES[1]
            and row["ranks"] <= 4
            and row["checksum"] == "sampled"
        ]
        for direction in ("write", "read"):
            for reference in ("fio", "probe"):
                figures = {
                    _label(row): row[direction]["ratio"][reference]["median"]
                    for row in rows
                    if reference in row[direction]["ratio"]
                }
                if figures:
                    worst = min(figures, key=lambda label: figures[label])
                    found.append(
                        Goal(
                            f"{direction} at least {GOAL_RATIO} of {_best(reference)}, blobs of 8 "
                            "to 64 MiB, 1 to 4 ranks",
                            f"{_listed(figures)}; least {figures[worst]:.2f}",
                            figures[worst] >= GOAL_RATIO,
                        )
                    )
            cpu = {_label(row): row[direction]["daemon_cpu"]["median"] for row in rows}
            if cpu:
                found.append(
                    Goal(
                        f"daemon at most {GOAL_CPU} CPU-s/GB, {direction}, sampled checksums, "
                        "blobs of 8 to 64 MiB, 1 to 4 ranks",
                        f"{_listed(cpu, 3)}; most {max(cpu.values()):.3f}",
                        max(cpu.values()) <= GOAL_CPU,
                    )
                )
        return found

    def markdown(self, result: dict[str, Any]) -> str:
        text = (
            "Tensors go through `DiskOffloadManager`: `save_tensor`, then `load_tensor` newest "
            "first, each rank a process of its own with an arena of a sixth of its data. *write* "
            "is from the first save until no write is under way, *read* the loads, *mixed* "
            "alternates a load of the oldest with a save. Two cycles warm up, in the second all "
            "bytes are compared. fio: psync, O_DIRECT, in the best of three forms (jobs and block "
            "size) for each direction; the probe: two threads, 8 MiB, anonymous huge pages, "
            "which is the steadier reference, since fio's own buffers are scattered memory or "
            "not by luck.\n\n"
        )
        for direction in DIRECTIONS:
            rows = []
            for row in result["cases"]:
                part = row[direction]
                rows.append(
                    [
                        _label(row),
                        *(
                            show(part["ratio"][name]) if name in part["ratio"] else "-"
                            for name in ("fio", "probe")
                        ),
                        f"{part['rate']['median'] / 1e9:.2f}",
                        show(part["daemon_cpu"], 3),
                        show(part["client_cpu"], 3),
                    ]
                )
            header = [
                "blobs",
                "over fio",
                "over probe",
                "GB/s",
                "daemon CPU-s/GB",
                "client CPU-s/GB",
            ]
            text += f"**{direction}**\n\n" + table(header, rows) + "\n"
        if result["engines"]:
            rows = [
                [e["name"], *(show(e[d]["fio"]) for d in ("write", "read"))]
                + [f"{e['cpu'][d]:.2f}" for d in ("write", "read")]
                for e in result["engines"]
                if "failure" not in e
            ]
            header = ["engine", "write over fio", "read over fio"]
            header += ["CPU-s/GB, write", "CPU-s/GB, read"]
            text += "Other engines, 64 MiB tensors, the same disk, alternating with fio:\n\n"
            text += table(header, rows)
            text += "".join(
                f"\n{e['name']} could not be run: {e['failure']}\n"
                for e in result["engines"]
                if "failure" in e
            )
        return text

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        def points(direction: str, key: str) -> list[tuple[float | str, float]]:
            return [
                (row["blob_bytes"] / MIB, _of(row[direction], key))
                for row in result["cases"]
                if row["ranks"] == 1 and row["checksum"] == "sampled"
            ]

        return [
            Plot(
                "io-rate",
                "Rate over the bare probe's, one rank",
                "blob, MiB",
                "ratio",
                {direction: points(direction, "probe") for direction in DIRECTIONS},
                reference=1.0,
                logarithmic_x=True,
            ),
            Plot(
                "io-cpu",
                "CPU of the daemon, one rank",
                "blob, MiB",
                "CPU-s/GB",
                {direction: points(direction, "cpu") for direction in DIRECTIONS},
                logarithmic_x=True,
            ),
        ]


def measure(
    chosen: Sequence[Case], directory: Path, progress: Progress, *, with_engines: bool
) -> dict[str, Any]:
    """All cases, and the other engines."""
    with ExitStack() as stack:
        size_bytes = max(min(case.data_bytes, 1536 * MIB) for case in chosen)
        probe = Probe(directory / "probe", size_bytes)
        stack.callback((directory / "probe").unlink)
        stack.callback(probe.close)
        references: list[Reference] = [probe]
        fio = None
        if peers.fio() is not None:
            progress("finding fio's best form")
            fio = Fio(directory / "fio", size_bytes)
            stack.callback((directory / "fio").unlink)
            references.insert(0, fio)
        rows = [measure_case(case, directory, references, progress) for case in chosen]
        others = engines.measure(directory, fio, progress) if with_engines and fio else []
        return {"cases": rows, "engines": others, "fio_forms": fio.forms if fio else {}}


def measure_case(
    case: Case, directory: Path, references: Sequence[Reference], progress: Progress
) -> dict[str, Any]:
    """All rounds of one case."""
    label = f"{format_size(case.blob_bytes)} x {case.ranks}, checksums {case.checksum}"
    ours: dict[str, list[Together]] = {direction: [] for direction in DIRECTIONS}
    theirs: dict[str, dict[str, list[float]]] = {
        direction: {reference.name: [] for reference in references} for direction in DIRECTIONS
    }
    with (
        service(directory, "--checksum", case.checksum) as daemon,
        Ranks(daemon, case.ranks, case.blob_bytes, case.blobs, case.arena_bytes) as ranks,
    ):
        progress(f"{label}: warming up")
        ranks.all("warm-up")
        for number in range(case.rounds):
            progress(f"{label}: round {number + 1} of {case.rounds}")
            for direction in ("write", "mixed", "read"):
                before = {r.name: r.run(direction) for r in references}
                ours[direction].append(ranks.all(direction))
                for reference in reversed(references):
                    after = reference.run(direction)
                    mean = 2 / (1 / before[reference.name] + 1 / after)
                    theirs[direction][reference.name].append(mean)
    result: dict[str, Any] = {
        "blob_bytes": case.blob_bytes,
        "ranks": case.ranks,
        "checksum": case.checksum,
    }
    for direction in DIRECTIONS:
        phases = ours[direction]
        rates = [phase.rate for phase in phases]
        result[direction] = {
            "rate": spread(rates),
            "ratio": {name: ratios(rates, values) for name, values in theirs[direction].items()},
            "reference_rate": {name: spread(v) for name, v in theirs[direction].items()},
            "daemon_cpu": spread([phase.daemon_cpu_per_gb for phase in phases]),
            "client_cpu": spread([phase.client_cpu_per_gb for phase in phases]),
        }
    return result


def _of(part: dict[str, Any], key: str) -> float:
    chosen = part["daemon_cpu"] if key == "cpu" else part["ratio"][key]
    return float(chosen["median"])


def _best(reference: str) -> str:
    return "fio's best" if reference == "fio" else "the bare probe"


def _label(row: dict[str, Any]) -> str:
    ranks = "" if row["ranks"] == 1 else f", {row['ranks']} ranks"
    checksum = "" if row["checksum"] == "sampled" else f", checksums {row['checksum']}"
    return f"{format_size(row['blob_bytes'])}{ranks}{checksum}"


def _listed(figures: dict[str, float], digits: int = 2) -> str:
    return "; ".join(f"{label}: {figure:.{digits}f}" for label, figure in figures.items())
