"""Residency and devices: what goes back to one ahead of its load, and what it serves by itself."""

import pytest

from disco_client.blobs import State
from disco_client.errors import BlobModified
from disco_client.residency import Group
from tests.helpers.simulation import Simulation


@pytest.fixture
def group() -> Group:
    """A group without limits."""
    return Group()


def saved(simulation: Simulation, group: Group, count: int) -> list[int]:
    """``count`` blobs of a page, listed to go back to their device."""
    blobs = [simulation.save(1, group) for _ in range(count)]
    for blob in blobs:
        simulation.list_ahead(blob)
    return blobs


def test_what_is_needed_first_goes_back_first(group: Group) -> None:
    """Else the copies of a cycle come in an order that the loads do not wait for."""
    simulation = Simulation(8)
    blobs = saved(simulation, group, 4)
    assert [simulation.lend_ahead() for _ in range(5)] == [*reversed(blobs), None]


def test_the_learned_order_goes_before_newest_first(group: Group) -> None:
    """Else a pipeline's first-in-first-out loads find the copies of the wrong blobs."""
    simulation = Simulation(8)
    for _ in range(2):
        blobs = saved(simulation, group, 3)
        order = [simulation.lend_ahead() for _ in range(3)]
        for loan in list(simulation.loans):
            simulation.unpin(loan)
        for blob in blobs:
            simulation.serve(blob)
        for blob in blobs:
            simulation.free(blob)
    assert order == blobs


def test_a_deviation_ranks_what_is_listed_anew(group: Group) -> None:
    """Else a cycle that is not like the last one brings back by an order that is over."""
    simulation = Simulation(8)
    blobs = saved(simulation, group, 3)
    for blob in blobs:
        simulation.serve(blob)
    for blob in blobs:
        simulation.free(blob)
    blobs = saved(simulation, group, 4)
    assert simulation.lend_ahead() == blobs[-1]


def test_what_is_on_disk_is_brought_back_when_it_is_read(group: Group) -> None:
    """Else a copy begins of a slot that the blob has not got, or the blob is forgotten."""
    simulation = Simulation(2)
    blobs = [simulation.save(1, group) for _ in range(3)]
    simulation.complete_all()
    assert simulation.residency.state(blobs[0]) is State.DISK
    for blob in blobs:
        simulation.list_ahead(blob)
    assert [simulation.lend_ahead() for _ in range(3)] == [blobs[2], blobs[1], None]
    simulation.unpin(simulation.loans[0])
    simulation.serve(blobs[2])
    simulation.free(blobs[2])
    simulation.execute(simulation.residency.prefetch(1))
    assert simulation.lend_ahead() is None
    simulation.complete_all()
    assert simulation.lend_ahead() == blobs[0]


def test_what_a_device_has_is_evicted_first_and_not_prefetched(group: Group) -> None:
    """Else the arena keeps, and the disk reads, what no load will ask for."""
    simulation = Simulation(3)
    blobs = [simulation.save(1, group) for _ in range(3)]
    held = simulation.residency._held
    for blob in blobs:
        if held.blobs[blob].state is State.DIRTY:
            held.want_write(held.blobs[blob])
    simulation.execute(held.take_instructions())
    simulation.complete_all()
    simulation.list_ahead(blobs[-1])
    assert simulation.lend_ahead() == blobs[-1]
    simulation.unpin(simulation.loans[0])
    simulation.save(1, group)
    assert simulation.residency.state(blobs[-1]) is State.DISK
    simulation.free(3)
    simulation.execute(simulation.residency.prefetch(None))
    assert simulation.reads == []
    simulation.give_up_ahead(blobs[-1])
    simulation.execute(simulation.residency.prefetch(None))
    assert simulation.reads == [blobs[-1]]


def test_a_load_ends_the_listing(group: Group) -> None:
    """Else what was loaded to another place is brought back for nobody."""
    simulation = Simulation(4)
    blobs = saved(simulation, group, 2)
    simulation.unpin(simulation.load(blobs[1]))
    simulation.serve(blobs[0])
    assert simulation.lend_ahead() is None
    simulation.list_ahead(blobs[1])
    assert simulation.lend_ahead() is None


def test_a_freed_blob_is_not_brought_back(group: Group) -> None:
    """Else a graph that is dropped still fills the device."""
    simulation = Simulation(4)
    blobs = saved(simulation, group, 3)
    simulation.free(blobs[2])
    assert simulation.lend_ahead() == blobs[1]


def test_a_spoilt_blob_is_lost_and_blocks_nobody(group: Group) -> None:
    """Else wrong bytes are loaded, or what is needed after it never goes back to the device."""
    simulation = Simulation(4)
    (good,) = saved(simulation, group, 1)
    spoilt = simulation.try_place(1, group)
    assert spoilt is not None
    simulation.list_ahead(spoilt)
    simulation.fill(spoilt, spoilt=True)
    assert simulation.residency.state(spoilt) is State.LOST
    assert simulation.lend_ahead() == good
    for call in (simulation.load, simulation.serve):
        with pytest.raises(BlobModified, match="being copied off its device"):
            call(spoilt)
    assert simulation.residency.arena_used_bytes == 4096
    simulation.free(spoilt)


def test_a_blob_that_was_served_before_it_landed_is_not_written(group: Group) -> None:
    """Else the plan's writes of what does not fit include what nobody needs any more."""
    simulation = Simulation(2)
    for cycle in range(2):
        blobs = []
        for _ in range(4):
            while (blob := simulation.try_place(1, group)) is None:
                simulation.complete(next(iter(simulation.ops)))
            blobs.append(blob)
            if cycle and len(blobs) == 1:
                simulation.written.clear()
                assert simulation.residency._order.writes_at_once(0)
                simulation.serve(blob)
            simulation.fill(blob)
            if cycle:
                assert simulation.written == []
                return
        for blob in reversed(blobs):
            simulation.use(blob)


def test_a_write_that_waits_for_its_turn_starts_when_the_loan_ends() -> None:
    """Else the write of a blob that was lent meanwhile is never made, and wait_for_save hangs."""
    simulation = Simulation(4)
    group = Group(max_writes=1)
    blobs = [simulation.save(1, group) for _ in range(2)]
    held = simulation.residency._held
    for blob in reversed(blobs):
        held.want_write(held.blobs[blob])
    simulation.execute(held.take_instructions())
    assert held.blobs[blobs[0]].wanted
    assert simulation.peek(blobs[0])
    simulation.complete(blobs[1])
    simulation.unpin(simulation.loans[0])
    assert list(simulation.ops) == [blobs[0]]


def test_a_blob_that_is_looked_at_while_another_thread_waits_for_it_stays(group: Group) -> None:
    """Else its slot is given to another blob while it is lent."""
    simulation = Simulation(1)
    first = simulation.save(1, group)
    simulation.save(1, group)
    simulation.free(1)
    simulation.complete_all()
    assert not simulation.try_load(first)
    simulation.complete(first)
    assert simulation.peek(first)
    with pytest.raises(Exception, match="held by loaded tensors"):
        simulation.try_place(1, group)
    simulation.unpin(simulation.loans[0])
    assert simulation.try_place(1, group) is not None
