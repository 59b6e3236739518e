"""Scale: many ranks on one daemon, by real processes, and more of them by the real schedule alone.

Two cores cannot run 64 trainers. What the daemon decides is in :mod:`discod.schedule`, which is
pure: it is run here over a simulated disk of equal, independent transfers.
"""

import statistics
import threading
import time
from pathlib import Path
from typing import Any

from discod.schedule import Entry, Priority, Schedule
from discod.wire.messages import Done, Read, Write
from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions, WrongBytes
from tests.benchmarks.page import table
from tests.benchmarks.ranks import Ranks, Together
from tests.benchmarks.service import service
from tests.benchmarks.spread import ratios, show, spread
from tests.helpers.daemon import Daemon
from tests.helpers.raw_client import RawClient

MIB = 1 << 20
BLOB_BYTES = 16 * MIB
CHUNK_BYTES = 8 * MIB
THREADS = 4
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
        found.append(
            Goal(
                "a blocked read waits for at most one chunk of a thread",
                f"median {blocked['chunks']['median']:.2f} times a chunk's write; in the "
                f"simulation at most {max(s['blocked_chunks'] for s in result['simulated']):.2f}",
                max(s["blocked_chunks"] for s in result["simulated"]) <= 1.0,
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
        blocked = result["blocked"]
        simulated = [
            [
                str(row["owners"]),
                f"{row['fairness']:.3f}",
                f"{row['blocked_chunks']:.2f}",
                f"{row['blocked_p50']:.2f}",
            ]
            for row in result["simulated"]
        ]
        return (
            "Real ranks, blobs of 16 MiB, the same bytes in all, each phase of all ranks at once; "
            "the runs with different numbers of ranks alternate.\n\n"
            + table(header, rows)
            + "\n**A blocked read while others write at full rate**: two clients keep "
            f"{blocked['queued']} writes of {BLOB_BYTES // MIB} MiB queued, a third one reads 1 "
            f"MiB, urgently, {blocked['reads']} times: {show(blocked['latency'], 2, 1e3)} ms; "
            f"alone {show(blocked['alone'], 2, 1e3)} ms. A chunk's write took "
            f"{blocked['chunk_seconds'] * 1e3:.2f} ms meanwhile.\n\n"
            "**Simulated**: the daemon's schedule with more owners than two cores can run, "
            f"{THREADS} threads, all writing, one reading urgently now and then. Bytes served, "
            "greatest over least of the owners; wait of the urgent reads, in chunks.\n\n"
            + table(["owners", "max/min bytes", "longest wait", "median"], simulated)
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
) -> dict[str, Any]:
    """Real ranks, a blocked read, and the simulation."""
    result = {"ranks": _ranks(counts, data_bytes, rounds, directory, progress)}
    progress("a blocked read")
    with service(directory, "--threads", str(THREADS), "--chunk", str(CHUNK_BYTES)) as daemon:
        blocked = _blocked(daemon, reads)
    simulated = [simulate(owners, 200) for owners in (8, 16, 64, 256)]
    return result | {"blocked": blocked, "simulated": simulated}


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


def _blocked(daemon: Daemon, reads: int) -> dict[str, Any]:
    """Urgent reads of one client, while two others keep many writes queued."""
    queued = 8
    writers = [RawClient(daemon.socket_dir, arena_bytes=2 * BLOB_BYTES) for _ in range(2)]
    reader = RawClient(daemon.socket_dir, arena_bytes=2 * MIB)
    reader.arena[:MIB] = bytes(range(256)) * (MIB // 256)
    token = _done(reader.write(0, 0, MIB)).checksum
    alone = [_read(reader, token) for _ in range(reads)]
    stop = threading.Event()
    chunk_seconds: list[float] = []

    def write(client: RawClient) -> None:
        def send(number: int) -> int:
            offset = number % queued * BLOB_BYTES
            return client.send(Write, file=0, offset=offset, slot=0, length=BLOB_BYTES)

        waiting = [send(number) for number in range(queued)]
        while not stop.is_set():
            began = time.perf_counter()
            _done(client.answer(waiting.pop(0)))
            chunk_seconds.append(time.perf_counter() - began)
            waiting.append(send(len(chunk_seconds)))
        for seq in waiting:
            client.answer(seq)

    threads = [threading.Thread(target=write, args=(client,)) for client in writers]
    for thread in threads:
        thread.start()
    try:
        began = time.perf_counter()
        latencies = [_read(reader, token) for _ in range(reads)]
        took = time.perf_counter() - began
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if not chunk_seconds:
        raise WrongBytes("no write was done meanwhile")
    # Writes have all threads but one, and each was two chunks.
    chunks = len(chunk_seconds) * BLOB_BYTES / CHUNK_BYTES
    each = took * (THREADS - 1) / chunks
    for client in (*writers, reader):
        client.close()
    return {
        "queued": 2 * queued,
        "reads": reads,
        "latency": spread(latencies),
        "p99": statistics.quantiles(latencies, n=100)[-1] if reads > 1 else latencies[0],
        "alone": spread(alone),
        "chunk_seconds": each,
        "chunks": spread([latency / each for latency in latencies]),
    }


def _read(client: RawClient, token: bytes) -> float:
    began = time.perf_counter()
    seq = client.send(Read, file=0, offset=0, slot=MIB, length=MIB, checksum=token, urgent=True)
    _done(client.answer(seq))
    took = time.perf_counter() - began
    if client.arena[MIB : MIB + 256] != bytes(range(256)):
        raise WrongBytes("a blocked read brought other bytes")
    return took


def _done(reply: Any) -> Done:
    if not isinstance(reply, Done):
        raise WrongBytes(f"a request failed: {reply}")
    return reply


def simulate(owners: int, rounds: int) -> dict[str, Any]:
    """The schedule of ``owners`` that write without end; owner 0 reads urgently in each round.

    Each thread's transfer of a chunk takes one unit of time. In each round every thread ends one
    and begins the next; a read is queued at a time that wanders through the unit.
    """
    schedule: Schedule[Entry] = Schedule(THREADS, CHUNK_BYTES)
    served = dict.fromkeys(range(owners), 0)
    waits: list[float] = []
    queued_at: dict[Entry, float] = {}

    def write(owner: int) -> None:
        schedule.push(Entry(owner, Priority.WRITE, BLOB_BYTES))

    for owner in range(owners):
        for _ in range(3):
            write(owner)
    ends = [number / THREADS for number in range(THREADS)]
    running: list[tuple[Entry, int] | None] = [None] * THREADS
    now, number = 0.0, 0
    while number < rounds * owners:
        thread = min(range(THREADS), key=lambda one: ends[one])
        now = ends[thread]
        ended = running[thread]
        if ended is not None:
            entry, length = ended
            if entry.priority is Priority.WRITE:
                served[int(str(entry.owner))] += length
                number += 1
            if schedule.finish(entry) and entry.priority is Priority.WRITE:
                write(int(str(entry.owner)))
        if number % (3 * THREADS) == 0 and not queued_at:
            read = Entry(0, Priority.URGENT, CHUNK_BYTES)
            schedule.push(read)
            queued_at[read] = now
        piece = schedule.pop()
        if piece is None:
            running[thread] = None
            ends[thread] = now + 1 / THREADS
            continue
        entry, _, length = piece
        if entry in queued_at:
            waits.append(now - queued_at.pop(entry))
        running[thread] = (entry, length)
        ends[thread] = now + 1.0
    return {
        "owners": owners,
        "fairness": max(served.values()) / max(1, min(served.values())),
        "blocked_chunks": max(waits),
        "blocked_p50": statistics.median(waits),
    }
