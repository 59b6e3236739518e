"""Steps timed in turns, and the rate of the disk."""

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.benchmarks.reference import Probe
from tests.gpu.bench import Bench


def seconds_of(bench: Bench, work: Callable[[], object]) -> float:
    """Wall time of ``work`` and all that it gave the device."""
    bench.synchronize()
    start = time.perf_counter()
    work()
    bench.synchronize()
    return time.perf_counter() - start


def in_turns(
    bench: Bench, works: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each of the ``works``, in turns, so that what wanders wanders for all."""
    gc.collect()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        names = list(works) if number % 2 else list(works)[::-1]
        for name in names:
            seconds[name].append(seconds_of(bench, works[name]))
    return seconds


def disk_rates(directory: Path, nbytes: int) -> tuple[float, float] | None:
    """Bytes per second that ``directory``'s disk writes and reads; None without O_DIRECT there."""
    path = directory / "probe"
    try:
        probe = Probe(path, nbytes)
    except OSError:
        path.unlink(missing_ok=True)
        return None
    try:
        probe.run("write")  # makes the extents, which takes longer
        return probe.run("write"), probe.run("read")
    finally:
        probe.close()
        path.unlink()
