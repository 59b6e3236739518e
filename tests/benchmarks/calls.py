"""Single calls on the trainer's thread: saves against plain copies, loads that hit, and that miss.

Timed at a trainer's pace, in which the caches are cold because a copy or a pause came before, and
in a tight loop, in which they are warm. The CPU time of the thread tells a call's own cost from
being moved aside by the processes that it wakes, of which there is much when no core is free.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import disco_client
from disco_client.arena import Arena
from discod.wire.sizes import format_size
from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions, WrongBytes
from tests.benchmarks.page import table
from tests.benchmarks.reference import BareReads
from tests.benchmarks.service import service
from tests.benchmarks.spread import show, spread
from tests.helpers.daemon import Daemon

KIB, MIB = 1 << 10, 1 << 20
ARENA_BYTES = 256 * MIB
GOAL_US = 60

Times = dict[str, list[float]]


class Calls:
    """See the module's text."""

    name = "calls"
    title = "Single calls: save, load hit, load miss"

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        sizes = [4 * KIB, 1 * MIB, 16 * MIB]
        if options.full:
            sizes = [4 * KIB, 64 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB]
        return measure(sizes, 400 if options.full else 120, options.directory, progress)

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        def figures(form: str, key: str) -> dict[str, float]:
            return {
                format_size(row["blob_bytes"]): row[form][key]["median"] for row in result["sizes"]
            }

        def listed(values: dict[str, float]) -> str:
            return "; ".join(f"{size}: {value * 1e6:.0f}" for size, value in values.items())

        found = []
        for form, words in (("paced", "at a trainer's pace"), ("tight", "in a tight loop")):
            for key, text in (("over", "save call over memcpy"), ("hit", "load hit")):
                values = figures(form, key)
                found.append(
                    Goal(
                        f"{text} at most {GOAL_US} us, {words}",
                        f"{listed(values)} us",
                        max(values.values()) <= GOAL_US / 1e6,
                    )
                )
        return found

    def markdown(self, result: dict[str, Any]) -> str:
        text = (
            "One thread (`torch.set_num_threads(1)`, as torchrun sets it). *memcpy* is a plain "
            "`copy_` of the same bytes into warm memory of the arena's kind, in turns with the "
            "saves. *Over* is a save less the memcpy beside it. *At a trainer's pace* each save's "
            "write is over before the next save begins, and blobs of 1 MiB and more are twice "
            "what fits in the arena, so that half of the saves begin a write. *Miss* is a load of "
            "a blob that is on disk, nothing read ahead, and *pread* the same bytes read from a "
            "file, O_DIRECT, by one bare call for each 8 MiB.\n\n"
        )
        keys = ("memcpy", "save", "over", "over_cpu", "hit")
        for form, words in (("paced", "At a trainer's pace"), ("tight", "In a tight loop")):
            rows = [
                [format_size(row["blob_bytes"]), *(show(row[form][k], 0, 1e6) for k in keys)]
                for row in result["sizes"]
            ]
            header = ["blob", "memcpy", "save", "over memcpy", "of it CPU", "load hit"]
            text += f"**{words}**, microseconds\n\n" + table(header, rows) + "\n"
        rows = [
            [
                format_size(row["blob_bytes"]),
                show(row["miss"]["load"], 2, 1e3),
                show(row["miss"]["pread"], 2, 1e3),
                show(row["miss"]["over"], 2, 1e3),
            ]
            for row in result["sizes"]
        ]
        header = ["blob", "load miss", "bare pread", "over it"]
        return text + "**Load miss**, milliseconds\n\n" + table(header, rows)

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        def points(form: str, key: str) -> list[tuple[float | str, float]]:
            return [
                (row["blob_bytes"] / MIB, row[form][key]["median"] * 1e6) for row in result["sizes"]
            ]

        series = {
            "save over memcpy, at a trainer's pace": points("paced", "over"),
            "save over memcpy, tight loop": points("tight", "over"),
            "load hit, at a trainer's pace": points("paced", "hit"),
            "load hit, tight loop": points("tight", "hit"),
        }
        title = "Time of discod's own on the trainer's thread"
        axes = ("blob, MiB", "us")
        return [Plot("calls", title, *axes, series, reference=GOAL_US, logarithmic_x=True)]


def measure(sizes: list[int], calls: int, directory: Path, progress: Progress) -> dict[str, Any]:
    """All sizes; ``calls`` of each kind at least, fewer of large blobs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with service(directory) as daemon:
            return {"sizes": [_measure(daemon, s, calls, directory, progress) for s in sizes]}
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _attached(daemon: Daemon) -> Iterator[None]:
    disco_client.connect(daemon.socket_dir, arena=ARENA_BYTES)
    try:
        yield
    finally:
        disco_client.close()


def _measure(
    daemon: Daemon, blob_bytes: int, calls: int, directory: Path, progress: Progress
) -> dict[str, Any]:
    label = format_size(blob_bytes)
    blobs = max(4, min(calls, ARENA_BYTES // 2 // blob_bytes))
    # Twice what fits, so that half of the saves begin a write; small ones would take too many.
    paced = 2 * ARENA_BYTES // blob_bytes if blob_bytes >= MIB else blobs
    rounds = max(2, -(-calls // blobs // (1 if blob_bytes < MIB else 4)))
    result: dict[str, Any] = {"blob_bytes": blob_bytes}
    with _attached(daemon):
        bench = _Bench(blob_bytes, blobs, paced)
        for form, run in (("paced", bench.paced), ("tight", bench.tight)):
            progress(f"{label}: {form}")
            run({})  # warms up
            times: Times = {}
            for _ in range(rounds):
                run(times)
            result[form] = {
                "memcpy": spread(times["memcpy"]),
                "save": spread(times["save"]),
                "over": spread(_minus(times["save"], times["memcpy"])),
                "over_cpu": spread(_minus(times["save_cpu"], times["memcpy_cpu"])),
                "hit": spread(times["hit"]),
            }
        bench.close()
    progress(f"{label}: misses")
    times = {}
    # Attached anew: once the order is known, what is loaded first would stay in RAM.
    with _attached(daemon), BareReads(directory / "misses", blob_bytes) as bare:
        bench = _Bench(blob_bytes, blobs, paced)
        bench.misses(times, bare.read)
        bench.close()
    result["miss"] = {
        "load": spread(times["miss"]),
        "pread": spread(times["pread"]),
        "over": spread(_minus(times["miss"], times["pread"])),
    }
    return result


class _Bench:
    """Blobs of one size. The memory that copies are compared with is of the arena's kind."""

    def __init__(self, blob_bytes: int, blobs: int, paced: int) -> None:
        self._blobs = blobs
        self._paced = paced
        self._blob_bytes = blob_bytes
        self._source = torch.randint(-(1 << 62), 1 << 62, (blob_bytes // 8,), dtype=torch.int64)
        self._memory = Arena(ARENA_BYTES // 2)
        self._memory.back(ARENA_BYTES // 2)
        self._targets = [
            torch.frombuffer(self._memory.view, dtype=torch.int64, count=blob_bytes // 8, offset=at)
            for at in range(0, ARENA_BYTES // 2 - blob_bytes + 1, blob_bytes)
        ]
        for target in self._targets:
            target.copy_(self._source)
        self._manager = disco_client.DiskOffloadManager()
        self._blind = disco_client.DiskOffloadManager(prefetch_size=0)
        self._at = 0

    def close(self) -> None:
        self._targets.clear()
        self._memory.close()

    def paced(self, times: Times) -> None:
        """Saves with a pause after each, as long as its write takes; then loads."""
        handles = []
        before = disco_client.stats().written_bytes
        for number in range(self._paced):
            handles.append(self._save_beside_copy(self._manager, number, times))
            self._manager.wait_for_save(handles[-1])
        if self._paced > self._blobs and disco_client.stats().written_bytes == before:
            raise WrongBytes("more was saved than fits, and nothing was written")
        self._hits(handles, times, pause=True)

    def tight(self, times: Times) -> None:
        """Saves and loads as fast as it goes, of as many as stay in the arena."""
        handles = [self._save_beside_copy(self._manager, n, times) for n in range(self._blobs)]
        self._hits(handles, times, pause=False)

    def misses(self, times: Times, bare: Callable[[int], None]) -> None:
        """Loads of what is on disk alone: the first of three arenas full."""
        count = 3 * ARENA_BYTES // max(self._blob_bytes, 8 * MIB)
        fillers = self._blob_bytes < 8 * MIB
        first = [self._save(self._blind, number) for number in range(min(self._blobs, 32))]
        large = torch.zeros(8 * MIB // 8, dtype=torch.int64) if fillers else self._source
        rest = [self._blind.save_tensor(large) for _ in range(count)]
        for handle in (*first, *rest):
            self._blind.wait_for_save(handle)
        for number, handle in enumerate(first):
            read_bytes = disco_client.stats().read_bytes
            began = time.perf_counter()
            tensor = self._blind.load_tensor(handle)
            times.setdefault("miss", []).append(time.perf_counter() - began)
            self._check(tensor, number)
            if disco_client.stats().read_bytes == read_bytes:
                raise WrongBytes("a blob that was to be on disk was in RAM")
            began = time.perf_counter()
            bare(number)
            times.setdefault("pread", []).append(time.perf_counter() - began)
            del tensor
            self._blind.cleanup_tensor(handle)
        self._blind.cleanup()

    def _save(self, manager: disco_client.DiskOffloadManager, n: int) -> disco_client.BlobHandle:
        self._source[0] = self._source[-1] = n
        return manager.save_tensor(self._source)

    def _save_beside_copy(
        self, manager: disco_client.DiskOffloadManager, number: int, times: Times
    ) -> disco_client.BlobHandle:
        self._source[0] = self._source[-1] = number
        if number % 2:  # in turns, because the second one finds the source in the cache
            self._copy(times)
        began, cpu = time.perf_counter(), time.thread_time()
        handle = manager.save_tensor(self._source)
        times.setdefault("save_cpu", []).append(time.thread_time() - cpu)
        times.setdefault("save", []).append(time.perf_counter() - began)
        if not number % 2:
            self._copy(times)
        return handle

    def _copy(self, times: Times) -> None:
        self._at = (self._at + 1) % len(self._targets)
        target = self._targets[self._at]
        began, cpu = time.perf_counter(), time.thread_time()
        target.copy_(self._source)
        times.setdefault("memcpy_cpu", []).append(time.thread_time() - cpu)
        times.setdefault("memcpy", []).append(time.perf_counter() - began)

    def _hits(self, handles: list[disco_client.BlobHandle], times: Times, *, pause: bool) -> None:
        number = len(handles)
        while handles:
            number -= 1
            if pause:  # what a layer's recomputation does to the caches
                self._targets[0].copy_(self._source)
                self._manager.trigger_prefetch()
                self._settle(number)
            misses = disco_client.stats().prefetch_misses
            began = time.perf_counter()
            tensor = self._manager.load_tensor(handles[-1])
            took = time.perf_counter() - began
            if disco_client.stats().prefetch_misses == misses:
                times.setdefault("hit", []).append(took)
            self._check(tensor, number)
            del tensor
            self._manager.cleanup_tensor(handles.pop())

    def _settle(self, number: int) -> None:
        """Give reads ahead the time of a layer's recomputation: of four copies."""
        for _ in range(4):
            self._targets[number % len(self._targets)].copy_(self._source)

    def _check(self, tensor: torch.Tensor, number: int) -> None:
        if tensor[0].item() != number or tensor[-1].item() != number:
            raise WrongBytes(f"blob {number} came back as {tensor[0].item()}")


def _minus(ours: list[float], theirs: list[float]) -> list[float]:
    return [a - b for a, b in zip(ours, theirs, strict=True)]
