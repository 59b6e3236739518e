"""Scale: many ranks on one daemon, by real processes, and more of them by the real schedule alone.

The blocked read is in :mod:`tests.benchmarks.blocked_read`, the ranks that two cores cannot run in
:mod:`tests.benchmarks.simulated_ranks`.
"""

from pathlib import Path
from typing import Any

from discod.schedule import Priority
from tests.benchmarks import blocked_read
from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions
from tests.benchmarks.page import table
from tests.benchmarks.ranks import Ranks, Together
from tests.benchmarks.service import service
from tests.benchmarks.simulated_ranks import simulate
from tests.benchmarks.spread import ratios, show, spread

MIB = 1 << 20
BLOB_BYTES = 16 * MIB
CHUNK_BYTES = 8 * MIB
THREADS = 4
LOADS = (Priority.WRITE, Priority.PREFETCH)
GOAL_RATE = 0.95
GOAL_FAIRNESS = 1.2


class Scale:
    """See the module's text."""

    name = "scale"
    title = "Scale: several ranks on one daemon"

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        if options.full:
            return measure((1, 2, 4, 8), 1536 * MIB, 5, 200, options.directory, progress)
        return measure((1, 2, 8), 768 * MIB, 2, 40, options.directory, progress)

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        most = result["ranks"][-1]
        found = []
        for direction in ("write", "read"):
            part = most[direction]
            rate = part["over_one"]["median"]
            fairness = part["fairness"]["median"]
            found += [
                Goal(
                    f"{most['count']} ranks: total rate at least {GOAL_RATE} of 1 rank's, "
                    f"{direction}",
                    f"{rate:.2f}",
                    rate >= GOAL_RATE,
                ),
                Goal(
                    f"{most['count']} ranks: longest over shortest time of a rank at most "
                    f"{GOAL_FAIRNESS}, {direction}",
                    f"{fairness:.2f}",
                    fairness <= GOAL_FAIRNESS,
                ),
            ]
        blocked = result["blocked"]
        longest = max(row["longest_wait"] for row in result["simulated"])
        found.append(
            Goal(
                "a blocked read waits for at most one chunk per thread",
                f"simulated: at most {longest:.2f} chunks; measured, with what the disk shares: "
                f"median {blocked['chunks']['median']:.2f} chunks",
                longest <= 1.0 and blocked["chunks"]["median"] <= 1.0,
            )
        )
        return found

    def markdown(self, result: dict[str, Any]) -> str:
        rows = [
            [
                str(row["count"]),
                *(show(row[d]["over_one"]) for d in ("write", "read")),
                *(show(row[d]["fairness"]) for d in ("write", "read")),
                *(f"{row[d]['rate']['median'] / 1e9:.2f}" for d in ("write", "read")),
            ]
            for row in result["ranks"]
        ]
        header = ["ranks", "write over 1 rank", "read", "max/min time of a rank, write", "read"]
        header += ["GB/s, write", "read"]
        return (
            "Real ranks, blobs of 16 MiB, the same bytes in all, each phase of all ranks at once; "
            "the runs with different numbers of ranks alternate.\n\n"
            + table(header, rows)
            + _blocked_text(result["blocked"])
            + _simulated_text(result["simulated"])
        )

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        series: dict[str, list[tuple[float | str, float]]] = {
            direction: [(row["count"], row[direction]["over_one"]["median"]) for row in rows]
            for rows in (result["ranks"],)
            for direction in ("write", "read")
        }
        return [Plot("scale", "Total rate over one rank's", "ranks", "ratio", series, 1.0)]


def measure(
    counts: tuple[int, ...],
    data_bytes: int,
    rounds: int,
    reads: int,
    directory: Path,
    progress: Progress,
    simulated_owners: tuple[int, ...] = (8, 16, 64, 256),
) -> dict[str, Any]:
    """Real ranks, a blocked read, and the simulation."""
    result = {"ranks": _ranks(counts, data_bytes, rounds, directory, progress)}
    progress("a blocked read")
    with service(directory, "--threads", str(THREADS), "--chunk", str(CHUNK_BYTES)) as daemon:
        blocked = blocked_read.measure(daemon, THREADS, CHUNK_BYTES, reads)
    progress("simulated ranks")
    simulated = [simulate(owners, load) for load in LOADS for owners in simulated_owners]
    return result | {"blocked": blocked, "simulated": simulated}


def _blocked_text(blocked: dict[str, Any]) -> str:
    return (
        f"\n**A blocked read while others write at full rate**: {blocked['writers']} clients keep "
        f"{blocked['queued']} writes of {blocked['write_bytes'] // MIB} MiB queued at "
        f"{blocked['threads']} threads, another one reads {blocked['read_bytes'] // MIB} MiB, "
        f"urgently, {blocked['reads']} times: {show(blocked['latency'], 2, 1e3)} ms, p99 "
        f"{blocked['p99'] * 1e3:.2f} ms; while nobody writes {show(blocked['alone'], 2, 1e3)} ms. "
        f"A chunk's write took {blocked['chunk_seconds'] * 1e3:.2f} ms meanwhile, so the read "
        f"took {show(blocked['chunks'])} chunks longer than alone. Of that a good part is the "
        "disk's, which serves the read and the writes at once.\n\n"
    )


def _simulated_text(simulated: list[dict[str, Any]]) -> str:
    rows = [
        [
            "write" if row["load"] == "write" else "read ahead",
            str(row["owners"]),
            f"{row['fairness']:.3f}",
            f"{row['longest_wait']:.2f}",
            f"{row['median_wait']:.2f}",
            str(row["reads"]),
        ]
        for row in simulated
    ]
    header = ["all", "ranks", "max/min bytes", "longest wait, chunks", "median", "blocked reads"]
    return (
        f"**Simulated**: the daemon's schedule with {THREADS} threads over a disk that takes at "
        "most one unit of time for a chunk, and more ranks than two cores can run. All write "
        "without end, or all read ahead without end, blobs of 4, 16 and 64 MiB, and now and then "
        "one of them is blocked in a read. Writes leave a thread free, so a read waits only for "
        "other reads.\n\n" + table(header, rows)
    )


def _ranks(
    counts: tuple[int, ...], data_bytes: int, rounds: int, directory: Path, progress: Progress
) -> list[dict[str, Any]]:
    found: dict[int, dict[str, list[Together]]] = {
        count: {"write": [], "read": []} for count in counts
    }
    for number in range(rounds):
        order = counts if number % 2 else counts[::-1]
        for count in order:
            progress(f"{count} ranks, round {number + 1} of {rounds}")
            blobs = max(4, data_bytes // count // BLOB_BYTES)
            arena_bytes = max(3, blobs // 6) * BLOB_BYTES
            with (
                service(directory) as daemon,
                Ranks(daemon, count, BLOB_BYTES, blobs, arena_bytes) as ranks,
            ):
                ranks.all("warm-up")
                for direction in ("write", "read"):
                    found[count][direction].append(ranks.all(direction))
    one = found[counts[0]]
    return [
        {
            "count": count,
            **{
                direction: {
                    "rate": spread([together.rate for together in phases]),
                    "over_one": ratios(
                        [together.rate for together in phases],
                        [together.rate for together in one[direction]],
                    ),
                    "fairness": spread([_fairness(together) for together in phases]),
                }
                for direction, phases in of_count.items()
            },
        }
        for count, of_count in found.items()
    ]


def _fairness(together: Together) -> float:
    """Longest over shortest time of a rank: all have the same to do, and begin together."""
    began = min(phase.began for phase in together.phases)
    times = [phase.ended - began for phase in together.phases]
    return max(times) / min(times)
