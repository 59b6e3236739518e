"""What is learned from a cycle: next uses, what to write at once, and when it no longer holds."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_client import plan as plan_module
from disco_client.plan import Event, Order, Plan
from discod.wire import PAGE_BYTES

Trace = list[tuple[Event, int]]

ON_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

MICROBATCHES, LAYERS, DEPTH = 6, 5, 3


def saves(*indices: int) -> Trace:
    """Saves, in that order."""
    return [(Event.SAVE, index) for index in indices]


def uses(*indices: int) -> Trace:
    """Loads, in that order, each followed by its free."""
    return [(event, index) for index in indices for event in (Event.LOAD, Event.FREE)]


def last_in_first_out(count: int) -> Trace:
    """One forward and one backward."""
    return saves(*range(count)) + uses(*reversed(range(count)))


def one_forward_one_backward() -> Trace:
    """A pipeline stage: ``DEPTH`` forwards, then backward and forward in turn."""
    layers = [range(batch * LAYERS, (batch + 1) * LAYERS) for batch in range(MICROBATCHES)]
    trace = [event for batch in layers[:DEPTH] for event in saves(*batch)]
    for done, batch in enumerate(layers):
        trace += uses(*reversed(batch))
        if done + DEPTH < MICROBATCHES:
            trace += saves(*layers[done + DEPTH])
    return trace


def planned(sizes: list[int], trace: Trace, capacity: int) -> Plan:
    """The plan; all in pages."""
    return Plan([size * PAGE_BYTES for size in sizes], trace, capacity * PAGE_BYTES)


@settings(ON_ANY_MACHINE, max_examples=100)
@given(count=st.integers(1, 30), size=st.integers(1, 4), spare=st.integers(0, 130))
def test_forward_and_backward_write_the_oldest_that_do_not_fit(
    count: int, size: int, spare: int
) -> None:
    """Else more is written than must be, or what is needed first goes to disk."""
    capacity = size + spare
    plan = planned([size] * count, last_in_first_out(count), capacity)
    fitting = capacity // size
    assert plan.write_at_once == set(range(max(0, count - fitting)))


@settings(ON_ANY_MACHINE, max_examples=100)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40), part=st.floats(0, 1))
def test_blobs_of_several_sizes_write_the_oldest_within_the_holes(
    sizes: list[int], part: float
) -> None:
    """Else sizes that do not divide the arena make every blob go to disk."""
    largest = max(sizes)
    capacity = 4 * largest + int(part * sum(sizes))
    plan = planned(sizes, last_in_first_out(len(sizes)), capacity)
    written = len(plan.write_at_once)
    assert plan.write_at_once == set(range(written))
    excess = max(0, sum(sizes) - capacity)
    # The arena is used as a ring: there is a hole at its end, and one at the seam.
    assert excess <= sum(sizes[:written]) < excess + 2 * largest


def test_what_fits_is_not_written() -> None:
    """Else a trainer with RAM enough wears its SSD out for nothing."""
    count = MICROBATCHES * LAYERS
    live = DEPTH * LAYERS
    assert planned([3] * count, one_forward_one_backward(), 3 * live).write_at_once == set()
    assert planned([3] * count, last_in_first_out(count), 3 * count).write_at_once == set()


def test_in_a_pipeline_the_oldest_of_each_microbatch_are_written() -> None:
    """Else a pipeline stage keeps what is needed last, and reads what is needed first."""
    plan = planned([1] * MICROBATCHES * LAYERS, one_forward_one_backward(), 10)
    assert 0 < len(plan.write_at_once) < MICROBATCHES * LAYERS
    layers = {index % LAYERS for index in plan.write_at_once}
    assert LAYERS - 1 not in layers
    assert layers == set(range(len(layers)))


@pytest.mark.parametrize(("capacity", "spare"), [(32, 1), (256, 4)])
def test_first_in_first_out_leaves_room_for_the_writes(capacity: int, spare: int) -> None:
    """Else each save waits for the write of the blob before it: no overlap at all."""
    count = 2 * capacity
    trace = saves(*range(count)) + uses(*range(count))
    plan = planned([1] * count, trace, capacity)
    assert len(plan.write_at_once) == count - capacity + spare


def test_a_blob_that_is_in_use_is_not_what_to_write() -> None:
    """Else a blob is written whose free came only a moment after the next load."""
    trace = saves(0, 1, 2, 3)
    trace += [(Event.LOAD, 3), (Event.LOAD, 2), (Event.FREE, 3), (Event.LOAD, 1), (Event.FREE, 2)]
    trace += [(Event.LOAD, 0), (Event.FREE, 1), (Event.FREE, 0)]
    assert planned([1] * 4, trace, 2).write_at_once == {0, 1}


def test_blobs_that_are_kept_after_their_load_count() -> None:
    """Else a graph that is kept for a second backward is planned as if it were gone."""
    trace = saves(0, 1, 2) + [(Event.LOAD, index) for index in (2, 1, 0)]
    trace += [(Event.FREE, index) for index in (2, 1, 0)]
    assert 0 in planned([1] * 3, trace, 2).write_at_once


def test_next_use_is_the_position_of_the_first_load() -> None:
    """Else eviction and prefetch go by something else than what happened."""
    trace = saves(0, 1) + uses(0) + saves(2) + [(Event.FREE, 1)] + uses(2)
    plan = planned([1, 2, 4], trace, 100)
    assert plan.loads == (0, 2)
    assert plan.next_use[0] < plan.next_use[2] < plan.next_use[1]
    assert plan.next_use[0] == 2


def test_bytes_before_use_are_what_is_saved_until_then() -> None:
    """Else prefetch takes room that forward is about to need."""
    plan = planned([1, 2, 4], saves(0, 1) + uses(0) + saves(2) + uses(1, 2), 100)
    assert plan.bytes_before_use(0, saves=0) == 3 * PAGE_BYTES
    assert plan.bytes_before_use(0, saves=2) == 0
    assert plan.bytes_before_use(1, saves=2) == 4 * PAGE_BYTES
    assert plan.bytes_before_use(1, saves=3) == 0
    assert plan.bytes_before_use(1, saves=9) == 0


def run(order: Order, sizes: list[int], trace: Trace) -> list[bool]:
    """Play a cycle; which events made it deviate."""
    deviations = []
    for event, index in trace:
        if event is Event.SAVE:
            deviations.append(order.expect_save(sizes[index] * PAGE_BYTES))
            assert order.save(sizes[index] * PAGE_BYTES) == index
        elif event is Event.LOAD:
            deviations.append(order.load(index))
        else:
            order.free(index)
    return deviations


def test_the_same_cycle_again_follows_and_is_not_learned_anew() -> None:
    """Else every step pays for a plan that it has."""
    order = Order(4 * PAGE_BYTES)
    assert not order.follows
    assert not order.writes_at_once(0)
    run(order, [1] * 6, last_in_first_out(6))
    order.end_cycle()
    plan = order.plan
    assert plan.write_at_once == {0, 1}
    for _ in range(2):
        assert not any(run(order, [1] * 6, last_in_first_out(6)))
        assert order.follows
        assert order.all_saved
        assert order.writes_at_once(0)
        order.end_cycle()
        assert order.plan is plan


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(saves(0, 1, 2, 3, 4), id="one more save"),
        pytest.param(saves(0, 1, 2, 3) + uses(0), id="another first load"),
        pytest.param(last_in_first_out(4) + saves(4), id="one more save, later"),
        pytest.param(saves(0, 1, 2) + uses(2), id="a save less"),
    ],
)
def test_the_first_deviation_ends_the_following(trace: Trace) -> None:
    """Else a plan that no longer holds goes on to decide what is kept."""
    order = Order(2 * PAGE_BYTES)
    run(order, [1] * 4, last_in_first_out(4))
    order.end_cycle()
    deviations = run(order, [1] * 5, trace)
    assert deviations == [False] * (len(deviations) - 1) + [True]
    assert not order.follows
    assert not order.sized
    assert not order.all_saved
    assert [order.next_use(index, used=False) for index in range(3)] == [0, -1, -2]
    assert order.bytes_before_use(0) == 0


def test_another_size_keeps_the_order_alone() -> None:
    """Else batches of varying length lose prefetch and eviction in each step."""
    order = Order(2 * PAGE_BYTES)
    trace = saves(0, 1, 2) + uses(0, 2, 1)
    run(order, [1] * 3, trace)
    order.end_cycle()
    assert order.writes_at_once(2) or order.writes_at_once(1)
    assert not any(run(order, [1, 2, 2], trace))
    assert order.follows
    assert not order.sized
    assert not any(order.writes_at_once(index) for index in range(3))
    uses_ = [order.next_use(index, used=False) for index in range(3)]
    assert uses_[0] < uses_[2] < uses_[1]
    order.end_cycle()
    assert order.plan.sizes == (PAGE_BYTES, 2 * PAGE_BYTES, 2 * PAGE_BYTES)


def test_cycles_without_loads_teach_nothing() -> None:
    """Else an evaluation between two steps makes the next one start from nothing."""
    order = Order(2 * PAGE_BYTES)
    run(order, [1] * 4, last_in_first_out(4))
    order.end_cycle()
    plan = order.plan
    run(order, [1] * 2, [*saves(0, 1), (Event.FREE, 0), (Event.FREE, 1)])
    order.end_cycle()
    assert order.plan is plan
    assert order.follows


def test_a_spoilt_cycle_teaches_nothing() -> None:
    """Else a step that failed half-way decides how the next one goes."""
    order = Order(2 * PAGE_BYTES)
    run(order, [1] * 4, last_in_first_out(2))
    order.spoil()
    order.end_cycle()
    assert not order.follows
    run(order, [1] * 4, last_in_first_out(2))
    order.end_cycle()
    assert order.follows


def test_a_cycle_that_never_ends_is_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one handle that is kept makes the trainer's memory grow with every step."""
    monkeypatch.setattr(plan_module, "MAX_TRACE_EVENTS", 10)
    order = Order(2 * PAGE_BYTES)
    run(order, [1] * 30, last_in_first_out(30))
    assert order._events is None
    assert len(order._sizes) <= 11
    order.end_cycle()
    assert not order.follows


def test_used_blobs_are_needed_last_the_newest_of_them_first() -> None:
    """Else what was loaded keeps its place before what still will be."""
    order = Order(PAGE_BYTES)
    keys = [order.next_use(index, used) for used in (False, True) for index in (9, 5, 0)]
    assert keys == sorted(keys)
    assert len(set(keys)) == 6


def test_a_batch_of_another_length_has_the_plan_in_proportion() -> None:
    """Else each step of a fine-tuning with padded batches writes what would fit."""
    order = Order(8 * PAGE_BYTES)
    run(order, [1] * 12, last_in_first_out(12))
    order.end_cycle()
    assert order.plan.write_at_once == set(range(4))
    assert not any(run(order, [2] * 12, last_in_first_out(12)))
    assert order.sized
    assert order.plan.write_at_once == set(range(8))
    order.end_cycle()
    run(order, [1] * 12, last_in_first_out(12))
    assert order.plan.write_at_once == set(range(4))


def test_a_batch_that_does_not_fit_in_proportion_keeps_the_plan() -> None:
    """Else a step raises for a blob that it never saves."""
    order = Order(4 * PAGE_BYTES)
    run(order, [1, 3], saves(0, 1) + uses(0, 1))
    order.end_cycle()
    run(order, [2, 1], saves(0, 1) + uses(0, 1))
    assert order.follows
    assert not order.sized


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(
            saves(*range(6)) + uses(5, 4) + [(Event.FREE, i) for i in range(4)], id="back"
        ),
        pytest.param([*saves(0, 1), (Event.FREE, 0), (Event.FREE, 1)], id="forward"),
    ],
)
def test_a_step_that_is_broken_off_teaches_nothing(broken: Trace) -> None:
    """Else the step after an exception begins from half an order."""
    order = Order(2 * PAGE_BYTES)
    run(order, [1] * 6, last_in_first_out(6))
    order.end_cycle()
    plan = order.plan
    run(order, [1] * 6, broken)
    assert order.over
    order.end_cycle()
    assert order.plan is plan


def test_a_few_blobs_that_are_kept_do_not_keep_a_cycle_from_ending() -> None:
    """Else one handle that is kept for ever, and nothing is learned any more."""
    order = Order(4 * PAGE_BYTES)
    run(order, [1], saves(0))
    steps = 0
    while not order.overdue:
        first = order.saves
        for _ in range(9):
            order.expect_save(PAGE_BYTES)
            order.save(PAGE_BYTES)
        for index in reversed(range(first, first + 9)):
            order.load(index)
            order.free(index)
        steps += 1
        assert steps < 20
    assert steps > 3, "a valley within a step would be taken for its end"
    assert not order.over
    saved = order.end_cycle()
    assert saved == 1 + 9 * steps
    assert order.next_use(-saved, used=False) > order.next_use(0, used=False)
    assert not order.load(-saved)
    order.free(-saved)
    assert not order.over
    for _ in range(2):
        run(order, [1] * 9, last_in_first_out(9))
        assert order.over
        order.end_cycle()
    assert order.plan.write_at_once == set(range(5))
