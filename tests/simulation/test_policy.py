"""The policy is near the optimum where there is an order to learn, and does no harm elsewhere.

The figures are those of ``python -m tests.simulation``; each factor is a little above its own.
"""

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_client.residency import Residency
from tests.simulation.compare import Figures, Row, compare
from tests.simulation.disk import Rates
from tests.simulation.machine import play
from tests.simulation.policies import Watermark
from tests.simulation.traces import MIB, Compute, Free, Load, Save, Step, Trace, Unload, all_traces

RATES = Rates()

TRACES = {trace.name: trace for trace in all_traces()}
ENDLESS = "endless pipeline"
"""No cycle of it ever ends, so nothing is learned."""
REGULAR = [name for name, trace in TRACES.items() if trace.regular and name != ENDLESS]
BROKEN = [name for name in TRACES if name not in REGULAR]

WRITTEN = {
    **dict.fromkeys(["1F1B, stage 0 of 4", "1F1B, stage 2 of 4"], 1.07),
    "interleaved 1F1B, stage 0 of 2": 1.09,
    "GRPO": 1.04,
    "two backwards": 1.10,
    "freed unread": 1.07,
}
"""Over the least, in steady state; 1.02 where nothing is said. Pipelines keep a slot for the write
under way: these arenas have 6 to 16 slots, and those of real jobs many more."""

READ = {
    "interleaved 1F1B, stage 0 of 2": 1.16,
    **dict.fromkeys(["1F1B, stage 0 of 4", "1F1B, stage 2 of 4"], 1.06),
    "two backwards": 1.06,
    "freed unread": 1.40,
}

WAITED = {"two backwards": 0.10}
"""Part of the computing; 0.01 where nothing is said."""


@functools.cache
def rows(name: str) -> dict[str, Row]:
    """The policy's figures and the watermark rule's."""
    return compare(TRACES[name], RATES, ["discod", Watermark.name])


def waited(figures: Figures) -> float:
    """Part of the time that was computed."""
    return figures.outcome.waited_seconds / figures.outcome.computed_seconds


@pytest.mark.parametrize("name", REGULAR)
def test_what_was_learned_is_near_the_optimum(name: str) -> None:
    """Else more is written than the disk need endure, or the trainer waits without need."""
    steady = rows(name)["discod"].steady
    least = steady.least
    assert steady.outcome.written_bytes <= WRITTEN.get(name, 1.02) * least.written_bytes
    assert steady.outcome.read_bytes <= READ.get(name, 1.02) * least.read_bytes
    assert waited(steady) <= WAITED.get(name, 0.01)


def test_nothing_is_written_when_all_fits() -> None:
    """Else a trainer with memory enough wears its disk out."""
    outcome = rows("plain, all fits")["discod"].steady.outcome
    assert (outcome.written_bytes, outcome.read_bytes, outcome.waited_seconds) == (0, 0, 0)


@pytest.mark.parametrize("name", TRACES)
def test_a_first_cycle_is_no_worse_than_the_watermark_rule(name: str) -> None:
    """Else a short job, or one whose order never repeats, would be better off without a plan.

    With several sizes holes take room that the rule, which only counts bytes, does not lose.
    """
    ours, rule = rows(name)["discod"].first, rows(name)[Watermark.name].first
    holes = 1.08 if name == "packed sequences, 1F1B" else 1.0
    assert ours.outcome.written_bytes <= holes * rule.outcome.written_bytes
    assert ours.outcome.read_bytes <= max(holes, 1.06) * rule.outcome.read_bytes
    assert waited(ours) <= waited(rule) + 0.03 * (holes - 1) / 0.08 + 1e-6


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_order_costs_little_over_the_watermark_rule(name: str) -> None:
    """Else a plan that does not hold would do harm for as long as the order goes on changing.

    A step that is broken off early has written as if it came to its end.
    """
    ours, rule = rows(name)["discod"].steady, rows(name)[Watermark.name].steady
    assert ours.outcome.written_bytes <= 1.08 * rule.outcome.written_bytes
    assert ours.outcome.read_bytes <= 1.02 * rule.outcome.read_bytes
    assert waited(ours) <= waited(rule) + 0.005


def test_varying_lengths_keep_what_does_not_fit() -> None:
    """Else each padded batch is a first cycle, which writes what would have fitted."""
    ours, rule = (rows("packed sequences")[name].steady for name in ("discod", Watermark.name))
    assert ours.outcome.written_bytes <= 1.03 * ours.least.written_bytes
    assert rule.outcome.written_bytes >= 1.10 * rule.least.written_bytes


def test_a_slow_disk_is_not_made_slower() -> None:
    """Else where the disk is the limit, more would be waited than its rate asks for."""
    slow = Rates(write=0.6e9, read=0.6e9)
    for name in ("plain", "GRPO"):
        found = compare(TRACES[name], slow, ["discod", Watermark.name])
        assert waited(found["discod"].steady) < waited(found[Watermark.name].steady) + 1e-6


STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 4)), max_size=60)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(cycles=st.lists(STEPS, min_size=1, max_size=3), again=st.booleans())
def test_no_use_ends_in_a_deadlock(cycles: list[list[tuple[int, int, int]]], again: bool) -> None:
    """Else some job would stand still for ever, with a disk that works."""
    steps: list[Step] = []
    alive: list[int] = []
    blobs = 0
    for cycle in cycles * (1 + again):
        for kind, which, size in cycle:
            if kind < 2 or not alive:
                steps.append(Save(blobs, size * MIB))
                alive.append(blobs)
                blobs += 1
            elif kind < 4:
                blob = alive[-1 - which % len(alive)]
                steps += [Load(blob), Compute(0.001), Unload(blob)]
                if kind == 3:
                    steps.append(Free(blob))
                    alive.remove(blob)
            else:
                steps.append(Free(alive.pop(which % len(alive))))
        if which_end := len(cycle) % 3:
            kept = alive[: which_end - 1]
            steps += [Free(blob) for blob in alive[which_end - 1 :]]
            alive = kept
    trace = Trace("any", 7 * MIB, (tuple(steps),), steady=0)
    residency = Residency(trace.capacity_bytes, files=1)
    play(trace, residency, Rates(latency_seconds=0.0005))
    assert residency.live_blobs == len(alive)
