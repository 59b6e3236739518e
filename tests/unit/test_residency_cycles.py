"""Residency over training-like cycles: what is written, read and waited for once it has learned.

Sizes are in pages. I/O is done at once ("fast"), or only while the trainer waits for it ("slow");
what residency decides to write must be the same.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from disco_client.residency import Counters, Group
from discod.wire import PAGE_BYTES
from discod.wire.messages import Failure
from tests.helpers.simulation import Simulation, check_invariants

Step = tuple[str, int]

ON_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def forward(*indices: int) -> list[Step]:
    """Saves, in that order."""
    return [("save", index) for index in indices]


def backward(*indices: int) -> list[Step]:
    """Uses (load, end of loan, free), newest first."""
    return [("use", index) for index in reversed(indices)]


def step(count: int) -> list[Step]:
    """One forward and one backward over ``count`` blobs."""
    return forward(*range(count)) + backward(*range(count))


def one_forward_one_backward(microbatches: int, layers: int, depth: int) -> list[Step]:
    """A pipeline stage with ``depth`` microbatches in flight."""
    batches = [range(batch * layers, (batch + 1) * layers) for batch in range(microbatches)]
    steps = [part for batch in batches[:depth] for part in forward(*batch)]
    for done, batch in enumerate(batches):
        steps += backward(*batch)
        if done + depth < microbatches:
            steps += forward(*batches[done + depth])
    return steps


class Trainer:
    """Plays steps, and tells what came of each. A step is one cycle, if no blob is left before."""

    def __init__(self, pages: int, fast: bool, files: int = 1, group: Group | None = None) -> None:
        self.simulation = Simulation(pages, files)
        self.group = group or Group()
        self.fast = fast

    def run(self, sizes: Sequence[int], steps: list[Step]) -> Counters:
        """Play a step; what it counted. ``self.written`` are the save indices that were written."""
        simulation = self.simulation
        start = simulation.residency.totals
        before = len(simulation.written)
        blobs: dict[int, int] = {}
        for kind, index in steps:
            if kind == "save":
                blobs[index] = simulation.save(sizes[index], self.group)
            else:
                simulation.use(blobs[index])
            if self.fast:
                simulation.complete_all()
        simulation.complete_all()
        assert simulation.residency.live_blobs == 0
        assert simulation.residency.arena_used_bytes == 0
        assert simulation.residency.scratch.used_bytes == 0
        indices = {blob: index for index, blob in blobs.items()}
        self.written = [indices[blob] for blob in simulation.written[before:]]
        return simulation.residency.totals.since(start)


both_speeds = pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])


@settings(ON_ANY_MACHINE, max_examples=40)
@given(
    count=st.integers(1, 30),
    size=st.integers(1, 3),
    spare=st.integers(0, 100),
    fast=st.booleans(),
)
@example(count=24, size=2, spare=22, fast=True)
def test_from_the_second_cycle_on_exactly_the_oldest_that_do_not_fit_are_written(
    count: int, size: int, spare: int, fast: bool
) -> None:
    """Else the SSD wears out sooner, or the blobs needed first are on disk."""
    capacity = size + spare
    trainer = Trainer(capacity, fast)
    excess = max(0, count - capacity // size)
    trainer.run([size] * count, step(count))
    for _ in range(3):
        cycle = trainer.run([size] * count, step(count))
        assert trainer.written == list(range(excess))
        assert cycle.written_bytes == excess * size * PAGE_BYTES
        assert cycle.read_bytes == cycle.written_bytes
        if fast and capacity >= 2 * size:
            assert cycle.prefetch_misses == 0
            assert cycle.prefetch_hits == excess


@settings(ON_ANY_MACHINE, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    part=st.floats(0, 1),
    fast=st.booleans(),
)
def test_several_sizes_write_the_oldest_within_the_holes(
    sizes: list[int], part: float, fast: bool
) -> None:
    """Else sizes that do not divide the arena make far more go to disk than must."""
    largest = max(sizes)
    capacity = 4 * largest + int(part * sum(sizes))
    excess = max(0, sum(sizes) - capacity)
    trainer = Trainer(capacity, fast)
    trainer.run(sizes, step(len(sizes)))
    for _ in range(3):
        cycle = trainer.run(sizes, step(len(sizes)))
        assert sorted(trainer.written) == list(range(len(trainer.written)))
        assert excess <= cycle.written_bytes // PAGE_BYTES < excess + 2 * largest
        if fast:
            assert cycle.prefetch_misses == 0


@both_speeds
def test_nothing_is_written_when_all_fits(fast: bool) -> None:
    """Else a trainer with RAM enough wears its SSD out for nothing."""
    pipeline = one_forward_one_backward(microbatches=6, layers=4, depth=2)
    for capacity, steps in ((48, step(24)), (16, pipeline)):
        trainer = Trainer(capacity, fast)
        trainer.run([2] * 24, steps)
        for _ in range(2):
            cycle = trainer.run([2] * 24, steps)
            assert trainer.written == []
            assert cycle.elided_bytes == cycle.saved_bytes == 48 * PAGE_BYTES
            assert cycle.prefetch_hits == cycle.prefetch_misses == 0


@both_speeds
def test_the_first_cycle_writes_no_more_than_the_watermark_asks(fast: bool) -> None:
    """Else a run of one step, or with an order that is never the same, writes everything."""
    trainer = Trainer(32, fast)
    trainer.run([1] * 40, step(40))
    assert trainer.written == list(range(8 + 4))


@both_speeds
def test_a_pipeline_is_learned(fast: bool) -> None:
    """Else a pipeline stage waits for reads, because newest-first is wrong there."""
    steps = one_forward_one_backward(microbatches=8, layers=8, depth=4)
    trainer = Trainer(16, fast)
    first = trainer.run([1] * 64, steps)
    cycles = [trainer.run([1] * 64, steps) for _ in range(2)]
    for cycle in cycles:
        assert cycle.written_bytes <= first.written_bytes
        assert cycle.read_bytes <= cycle.written_bytes + 4 * PAGE_BYTES
        if fast:
            assert cycle.prefetch_misses <= 4 < first.prefetch_misses


@both_speeds
def test_gradient_accumulation_is_one_cycle_a_microbatch(fast: bool) -> None:
    """Else what one microbatch teaches is not known in the next."""
    trainer = Trainer(8, fast)
    trainer.run([1] * 12, step(12))
    for _ in range(4):
        trainer.run([1] * 12, step(12))
        assert trainer.written == [0, 1, 2, 3]


@both_speeds
def test_other_sizes_and_other_orders_in_between_do_no_harm(fast: bool) -> None:
    """Else one odd step (an evaluation, a short batch) breaks those after it."""
    rng = random.Random(5)
    trainer = Trainer(12, fast, files=2)
    for _ in range(3):
        trainer.run([1] * 20, step(20))
        trainer.run([1] * 20, step(20))
        assert trainer.written == list(range(8))
        trainer.run([2] * 20, step(20))
        trainer.run([1] * 25, step(25))
        trainer.run([1] * 20, step(7))
        order = list(range(20))
        rng.shuffle(order)
        trainer.run([1] * 20, forward(*range(20)) + [("use", index) for index in order])


@both_speeds
def test_batches_of_varying_length_keep_what_was_learned(fast: bool) -> None:
    """Else every step of a fine-tuning with padded batches begins from nothing."""
    trainer = Trainer(40, fast)
    steps = one_forward_one_backward(microbatches=8, layers=6, depth=4)
    trainer.run([3] * 48, steps)
    for size in (4, 3, 5, 4):
        learned = trainer.run([size] * 48, steps)
        unlearned = Trainer(40, fast).run([size] * 48, steps)
        assert 2 * learned.read_bytes <= unlearned.read_bytes + PAGE_BYTES * size
        assert learned.prefetch_misses < unlearned.prefetch_misses


@settings(ON_ANY_MACHINE, max_examples=40)
@given(data=st.data())
def test_any_orders_in_any_turn(data: st.DataObject) -> None:
    """Else some change of pattern makes residency lose data, hang, or leak."""
    fast = data.draw(st.booleans())
    group = Group(
        max_prefetch=data.draw(st.none() | st.integers(0, 3)),
        max_writes=data.draw(st.none() | st.integers(1, 3)),
    )
    trainer = Trainer(data.draw(st.integers(3, 20)), fast, data.draw(st.integers(1, 2)), group)
    known: list[tuple[list[int], list[Step]]] = []
    for _ in range(data.draw(st.integers(2, 5))):
        if known and data.draw(st.booleans()):
            sizes, steps = data.draw(st.sampled_from(known))
        else:
            count = data.draw(st.integers(1, 20))
            sizes = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
            steps = []
            live: list[int] = []
            waiting = list(range(count))
            while live or waiting:
                if waiting and (not live or data.draw(st.booleans())):
                    steps.append(("save", waiting[0]))
                    live.append(waiting.pop(0))
                else:
                    used = live.pop(data.draw(st.integers(0, len(live) - 1)))
                    steps.append(("use", used))
            known.append((sizes, steps))
        cycle = trainer.run(sizes, steps)
        assert cycle.saved_bytes == sum(sizes) * PAGE_BYTES


def test_a_disk_that_fails_now_and_then_costs_no_data() -> None:
    """Else one bad write in a long run ends it, or spoils its gradients."""
    rng = random.Random(11)
    simulation = Simulation(10, files=2)
    group = Group()
    for _ in range(30):
        blobs = []
        for _ in range(20):
            while (blob := simulation.try_place(1, group)) is None:
                fail_now_and_then(simulation, rng)
            simulation.fill(blob)
            blobs.append(blob)
            if simulation.ops and rng.random() < 0.5:
                fail_now_and_then(simulation, rng)
        for blob in reversed(blobs):
            simulation.use(blob)
        simulation.complete_all()


def fail_now_and_then(simulation: Simulation, rng: random.Random) -> None:
    """Let some I/O end: one write in eight fails, on one of its files or for all."""
    blob = rng.choice(list(simulation.ops))
    outcome = rng.choice([None] * 14 + [Failure.IO, Failure.DISK_FULL])
    simulation.complete(blob, outcome, rng.choice([None, 0, 1]) if outcome else None)


def test_two_managers_share_an_arena() -> None:
    """Else the limits of one manager decide what becomes of another's blobs."""
    simulation = Simulation(12)
    one, two = Group(max_prefetch=2, max_writes=1), Group()
    for _ in range(3):
        blobs = [simulation.save(1, (one, two)[index % 2]) for index in range(24)]
        for blob in reversed(blobs):
            simulation.use(blob)
            simulation.complete_all()
        assert not simulation.residency._held.groups
    assert simulation.residency.last_cycle.read_bytes <= 13 * PAGE_BYTES


def test_a_group_outlives_the_residency_it_was_used_with() -> None:
    """Else a manager that is used after a new attach reads blobs that only the old one had."""
    group = Group(max_prefetch=2, max_writes=1)
    left_behind = Simulation(4)
    for _ in range(8):
        left_behind.save(1, group)
        left_behind.complete_all()
    simulation = Simulation(4)
    for _ in range(3):
        blobs = [simulation.save(1, group) for _ in range(8)]
        for blob in reversed(blobs):
            simulation.use(blob)
            simulation.complete_all()
            check_invariants(simulation)


def test_a_graph_kept_for_a_second_backward_is_read_again() -> None:
    """Else retain_graph=True gives wrong data, or a full arena, the second time."""
    simulation = Simulation(8)
    group = Group()
    for _ in range(3):
        blobs = [simulation.save(1, group) for _ in range(20)]
        for _ in range(2):
            for blob in reversed(blobs):
                simulation.unpin(simulation.load(blob))
        for blob in blobs:
            simulation.free(blob)
        simulation.complete_all()
    assert simulation.residency.arena_used_bytes == 0


@pytest.mark.parametrize("kept", [1, 2])
def test_blobs_that_are_kept_for_ever_leave_the_rest_to_be_learned(kept: int) -> None:
    """Else one handle in some list makes every step write and wait as if it were the first."""
    simulation = Simulation(12)
    group = Group()
    handles = [simulation.save(1, group) for _ in range(kept)]
    written = []
    for _ in range(14):
        before = len(simulation.written)
        blobs = [simulation.save(1, group) for _ in range(24)]
        for blob in reversed(blobs):
            simulation.use(blob)
            simulation.complete_all()
        written.append([blob - blobs[0] for blob in simulation.written[before:]])
    assert written[-1] == written[-2] == list(range(12)), "the kept ones are on disk, and stay"
    assert simulation.residency.last_cycle.read_bytes == 12 * PAGE_BYTES
    assert simulation.residency.last_cycle.saved_blobs == 24
    for handle in handles:
        simulation.use(handle)
    simulation.finish()


def test_a_second_backward_is_read_ahead() -> None:
    """Else retain_graph=True waits for each read of the second backward by itself."""
    simulation = Simulation(8)
    group = Group()
    blobs = [simulation.save(1, group) for _ in range(20)]
    for blob in reversed(blobs):
        simulation.unpin(simulation.load(blob))
        simulation.complete_all()
    before = simulation.residency.prefetch_misses
    for blob in reversed(blobs):
        simulation.use(blob)
        simulation.complete_all()
    assert simulation.residency.prefetch_misses - before <= 2


def test_a_guess_evicts_nothing() -> None:
    """Else the first cycle of a pipeline reads each blob several times."""
    simulation = Simulation(8)
    group = Group()
    blobs = [simulation.save(1, group) for _ in range(16)]
    simulation.complete_all()
    for blob in blobs:
        simulation.use(blob)
        simulation.complete_all()
    assert len(simulation.reads) <= 16 + 8
