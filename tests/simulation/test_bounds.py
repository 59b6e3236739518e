"""The bounds are bounds: nothing does better, and where it can be computed the least is met."""

import random

import pytest

from discod.schedule import Priority
from tests.simulation.bounds import bounds, least_by_search
from tests.simulation.compare import compare
from tests.simulation.disk import Disk, Rates
from tests.simulation.traces import (
    MIB,
    Compute,
    Cycle,
    Free,
    Load,
    Save,
    Step,
    Trace,
    Unload,
    plain,
)

RATES = Rates()


def any_use(rng: random.Random, blobs: int, sizes: tuple[int, ...], again: bool) -> Cycle:
    """Saves, loads and frees in any order; ``again``: also several loads of a blob, or none."""
    steps: list[Step] = []
    alive: list[int] = []
    saved = 0
    while saved < blobs or alive:
        steps.append(Compute(rng.choice([0.0, 0.001, 0.02])))
        if saved < blobs and (not alive or rng.random() < 0.6):
            steps.append(Save(saved, rng.choice(sizes)))
            alive.append(saved)
            saved += 1
            continue
        blob = rng.choice(alive)
        if not again or rng.random() < 0.7:
            steps += [Load(blob), Unload(blob)]
        if not again or rng.random() < 0.5:
            steps.append(Free(blob))
            alive.remove(blob)
    return tuple(steps)


def test_no_choice_of_whole_blobs_is_below_the_bounds() -> None:
    """Else a policy would be called near the optimum that is far from it, or better than it."""
    rng = random.Random(0)
    for _ in range(60):
        cycle = any_use(rng, 6, (1, 2, 3), again=True)
        capacity = rng.randint(3, 6)
        least = bounds(cycle, capacity, RATES)
        written, read = least_by_search(cycle, capacity)
        assert least.written_bytes <= written
        assert least.read_bytes <= read


def test_with_equal_sizes_and_one_use_the_bounds_are_the_least() -> None:
    """Else the bounds say nothing of the traces of training, which are such."""
    rng = random.Random(1)
    for _ in range(60):
        cycle = any_use(rng, 6, (1,), again=False)
        capacity = rng.randint(1, 4)
        least = bounds(cycle, capacity, RATES)
        assert least_by_search(cycle, capacity) == (least.written_bytes, least.read_bytes)


def test_no_policy_is_below_the_bounds() -> None:
    """Else they are no bounds of what is measured: real placement, and a disk that takes time."""
    rng = random.Random(2)
    for _ in range(12):
        cycle = any_use(rng, 14, (8 * MIB, 24 * MIB, 32 * MIB), again=True)
        trace = Trace("any", rng.randint(3, 8) * 24 * MIB, (cycle,), steady=0)
        for row in compare(trace, RATES).values():
            took, least = row.steady.outcome, row.steady.least
            assert took.written_bytes >= least.written_bytes
            assert took.read_bytes >= least.read_bytes
            assert took.waited_seconds >= least.waited_seconds - 1e-9


def test_the_least_wait_is_nearly_met_on_a_disk_that_cannot_keep_up() -> None:
    """Else a policy that makes a slow disk slower would look as good as can be."""
    slow = Rates(write=0.5e9, read=0.5e9)
    steady = compare(plain(cycles=3), slow, ["discod"])["discod"].steady
    assert steady.least.waited_seconds > 0.3 * steady.outcome.computed_seconds
    assert steady.outcome.waited_seconds < 1.01 * steady.least.waited_seconds


@pytest.mark.parametrize("threads", [2, 4])
def test_the_disk_moves_bytes_at_its_rates(threads: int) -> None:
    """Else seconds waited would be those of a disk that nobody has."""
    disk = Disk(Rates(write=1e9, read=0.5e9, latency_seconds=0.0, threads=threads))
    for blob in range(10):
        disk.submit(blob, Priority.WRITE, 100_000_000)
    disk.run_until(0.99)
    assert disk.busy
    disk.run_until(1.01)
    assert len(disk.take_ended()) == 10
    assert not disk.busy
    disk.submit(0, Priority.URGENT, 500_000_000)
    disk.run_until_ended()
    assert disk.now == pytest.approx(2.01)


def test_reads_go_before_writes_and_what_has_not_begun_can_be_cancelled() -> None:
    """Else a read that a trainer waits for would wait for all writes, as it does not in discod."""
    disk = Disk(Rates(write=1e9, read=1e9, latency_seconds=0.0, threads=2))
    for blob in range(10):
        disk.submit(blob, Priority.WRITE, 100_000_000)
    disk.run_until(0.05)
    disk.submit(10, Priority.URGENT, 10_000_000)
    disk.cancel(9)
    disk.run_until_ended()
    (request,) = disk.take_ended()
    assert (request.blob, request.cancelled) == (9, True)
    disk.run_until_ended()
    assert [request.blob for request in disk.take_ended()] in ([10], [0])
    assert disk.now < 0.15
