"""Residency against arbitrary use: any order of calls, completions and failures.

What is checked after every single step is ``tests.helpers.simulation.check_invariants``.
"""

from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from disco_client import extents
from disco_client.blobs import State
from disco_client.errors import (
    ArenaFull,
    BlobCorrupted,
    BlobModified,
    BlobTooLarge,
    ScratchError,
    ScratchFull,
)
from disco_client.residency import Group
from discod.wire import PAGE_BYTES
from discod.wire.messages import Failure
from tests.helpers.simulation import Simulation, check_invariants

LIMITS = st.none() | st.integers(1, 3)


@pytest.fixture(autouse=True)
def _small_stripes() -> Iterator[None]:
    with mock.patch.object(extents, "STRIPE_BYTES", 2 * PAGE_BYTES):
        yield


class AnyUse(RuleBasedStateMachine):
    """A trainer, a daemon and a disk that do whatever they may, at any moment."""

    @initialize(
        pages=st.integers(2, 24),
        files=st.integers(1, 3),
        limits=st.lists(st.tuples(st.none() | st.integers(0, 3), LIMITS), min_size=1, max_size=3),
    )
    def start(self, pages: int, files: int, limits: list[tuple[int | None, int | None]]) -> None:
        self.pages = pages
        self.simulation = Simulation(pages, files)
        self.groups = [Group(max_prefetch, max_writes) for max_prefetch, max_writes in limits]

    def pick(self, data: st.DataObject, items: object) -> object:
        return data.draw(st.sampled_from(list(items)))

    @rule(data=st.data(), size=st.integers(1, 6), lands=st.booleans())
    def place(self, data: st.DataObject, size: int, lands: bool) -> None:
        simulation = self.simulation
        try:
            blob = simulation.try_place(size, self.pick(data, self.groups))
        except BlobTooLarge:
            assert size > self.pages
        except (ArenaFull, ScratchFull, ScratchError) as error:
            self.check_hopeless(error)
        else:
            assert size <= self.pages
            if blob is not None and lands:
                simulation.fill(blob)

    @precondition(lambda self: self.simulation.filling)
    @rule(data=st.data(), outcome=st.sampled_from(["lands", "lands", "spoilt", "fails"]))
    def land(self, data: st.DataObject, outcome: str) -> None:
        blob = self.pick(data, self.simulation.filling)
        if outcome == "fails":
            self.simulation.abandon(blob)
        else:
            self.simulation.fill(blob, spoilt=outcome == "spoilt")

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def list_ahead(self, data: st.DataObject) -> None:
        self.simulation.list_ahead(self.pick(data, self.simulation.live))

    @precondition(lambda self: self.simulation.live)
    @rule()
    def list_all_ahead(self) -> None:
        for blob in list(self.simulation.live):
            self.simulation.list_ahead(blob)

    @rule()
    def lend_ahead(self) -> None:
        self.simulation.lend_ahead()

    @precondition(lambda self: self.simulation.ahead)
    @rule(data=st.data())
    def give_up_ahead(self, data: st.DataObject) -> None:
        self.simulation.give_up_ahead(self.pick(data, self.simulation.ahead))

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        blob = self.pick(data, self.simulation.live)
        try:
            self.simulation.serve(blob)
        except BlobModified:
            assert blob in self.simulation.modified
            self.simulation.give_up_ahead(blob)

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.try_load(self.pick(data, self.simulation.live))

    @precondition(lambda self: self.simulation.live)
    @rule()
    def load_newest(self) -> None:
        self.try_load(max(self.simulation.live))

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def peek(self, data: st.DataObject) -> None:
        self.simulation.peek(self.pick(data, self.simulation.live))

    def try_load(self, blob: int) -> None:
        simulation = self.simulation
        try:
            simulation.try_load(blob)
        except BlobModified:
            assert blob in simulation.modified
        except BlobCorrupted:
            assert simulation.residency.state(blob) is State.DISK
        except (ArenaFull, ScratchFull, ScratchError) as error:
            self.check_hopeless(error)

    @precondition(lambda self: self.simulation.loans)
    @rule(data=st.data(), modified=st.sampled_from([False, False, False, True]))
    def unpin(self, data: st.DataObject, modified: bool) -> None:
        loan = self.pick(data, self.simulation.loans)
        if modified:
            self.simulation.modify(loan)
        self.simulation.unpin(loan)

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.simulation.free(self.pick(data, self.simulation.live))

    @precondition(lambda self: self.simulation.live)
    @rule()
    def free_all(self) -> None:
        for blob in list(self.simulation.live):
            self.simulation.free(blob)

    @rule(n=st.none() | st.integers(0, 3))
    def prefetch(self, n: int | None) -> None:
        before = len(self.simulation.reads)
        self.simulation.execute(self.simulation.residency.prefetch(n))
        assert n is None or len(self.simulation.reads) - before <= n

    @precondition(lambda self: self.simulation.ops)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        op = self.simulation.ops[self.pick(data, self.simulation.ops)]
        op.begun = op.begun or not op.cancelled

    @precondition(lambda self: self.simulation.ops)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(
            [None] * 6
            + [Failure.DISK_FULL, Failure.OUT_OF_USE, Failure.IO]
            + [Failure.CORRUPT, Failure.CANCELLED]
        ),
        named=st.booleans(),
    )
    def complete(self, data: st.DataObject, outcome: Failure | None, named: bool) -> None:
        blob = self.pick(data, self.simulation.ops)
        file = None
        if named:
            file = self.pick(data, [p.file for p in self.simulation.ops[blob].start.pieces])
        self.simulation.complete(blob, outcome, file)

    @rule()
    def retry_disk(self) -> None:
        self.simulation.residency.retry_disk()

    def check_hopeless(self, error: Exception) -> None:
        """No room was right: nothing is in flight, and nothing else can be taken from RAM."""
        simulation = self.simulation
        held = simulation.residency._held
        assert not simulation.pending
        ram = [b for b in held.blobs.values() if b.slot is not None and not b.pins]
        assert all(b.state is State.DIRTY for b in ram)
        if isinstance(error, ScratchFull):
            assert held.full_files
        elif isinstance(error, ScratchError):
            assert held.out_files or any(b.save_error for b in ram)
        else:
            assert not ram
        check_invariants(simulation)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()


def test_any_use() -> None:
    """Else some order of calls, completions and failures loses data, leaks, or hangs."""
    on_any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(
        AnyUse, settings=settings(on_any_machine, max_examples=120, stateful_step_count=80)
    )
