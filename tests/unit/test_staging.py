"""What is kept of devices, and for how long: the rules alone, with copies that land when told."""

from typing import Any, cast

import pytest
import torch

from disco_client.devices.interface import Arrival, Departure
from disco_client.link import Link
from disco_client.residency import Group, Residency, State
from disco_client.staging import NoUnits, Staging
from disco_client.transfers import Transfers
from discod.wire import PAGE_BYTES

ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


class Told:
    """A ticket whose copy lands when the test says so."""

    needs_daemon = False

    def __init__(self) -> None:
        self.landed = False
        self.looks = 0
        self.joins = 0

    def done(self) -> bool:
        self.looks += 1
        return self.landed

    def wait(self) -> None:
        self.landed = True

    def join(self, flat: torch.Tensor) -> None:
        self.joins += 1


class Units:
    """Two devices, with memory for two pages of copies each."""

    def __init__(self) -> None:
        self.short = {ONE: 0, TWO: 0}
        self.out_of_reach = False

    def reachable(self) -> bool:
        return not self.out_of_reach

    def limit_bytes(self, device: torch.device) -> int:
        return 2 * PAGE_BYTES

    def shortages(self, device: torch.device) -> int:
        return self.short[device]

    def close(self) -> None:
        pass


class Mute:
    """A link that takes requests."""

    directories = ("scratch",)

    def request(self, make: Any, answer: Any) -> int:
        return 0


class Stage:
    """A staging with blobs of one page."""

    def __init__(self, keep: int | None = 1) -> None:
        self.units = Units()
        self.residency = Residency(64 * PAGE_BYTES, 1)
        transfers = Transfers(cast(Link, Mute()), self.residency)
        self.staging = Staging(self.residency, transfers, self.units, keep)
        self.group = Group()

    def depart(self, device: torch.device = ONE, ahead: bool = True) -> tuple[int, Departure, Told]:
        """A save whose copy was started."""
        blob, _ = self.residency.try_place(PAGE_BYTES, self.group)
        assert blob is not None
        ticket = Told()
        departure = Departure(torch.zeros(PAGE_BYTES, dtype=torch.uint8), ticket, Told())
        departure.device = device
        self.staging.depart(blob, departure, ahead)
        return blob, departure, ticket

    def saved(self, device: torch.device = ONE) -> int:
        """A save that has landed."""
        blob, _, ticket = self.depart(device)
        ticket.landed = True
        assert self.staging.settle()
        return blob

    def bring(self) -> tuple[int, torch.device, Told]:
        """The next copy ahead, started."""
        wanted = self.staging.next_ahead()
        assert wanted is not None
        blob, device, nbytes = wanted
        self.residency.lend_ahead(blob)
        ticket = Told()
        arrival = Arrival(torch.zeros(nbytes, dtype=torch.uint8), ticket)
        arrival.device = device
        self.staging.arrive(arrival, memoryview(bytearray(1)))
        self.staging.bring_ahead(blob, arrival)
        return blob, device, ticket

    def free(self, blob: int) -> None:
        """The handle is gone."""
        self.residency.free(blob)
        self.staging.forget(blob)


def test_each_device_has_its_own_bound() -> None:
    """Else one GPU's slow link holds up the saves of another."""
    stage = Stage()
    stage.depart(ONE)
    stage.depart(ONE)
    assert not stage.staging.admits(ONE, PAGE_BYTES)
    assert stage.staging.admits(TWO, PAGE_BYTES)
    assert stage.staging.admits(TWO, 1 << 40), "one copy may be of any size"


def test_each_device_lands_in_its_own_order() -> None:
    """Else a copy of one GPU that is late keeps the slots and sources of another's."""
    stage = Stage(keep=0)
    first, _, late = stage.depart(ONE)
    second, _, ticket = stage.depart(TWO)
    third, _, other = stage.depart(ONE)
    ticket.landed = other.landed = True
    assert stage.staging.settle()
    state = stage.residency.state
    assert [state(b) for b in (first, second, third)] == [State.FILLING, State.DIRTY, State.FILLING]
    assert stage.staging.admits(TWO, 1 << 40)
    late.landed = True
    assert stage.staging.settle()
    assert state(third) is State.DIRTY
    assert not stage.staging.pending
    assert not stage.staging.settle()


def test_only_the_oldest_copy_of_a_device_is_looked_at() -> None:
    """Else every call pays for hundreds of copies under way."""
    stage = Stage()
    tickets = [stage.depart(ONE)[2] for _ in range(20)]
    looks = [ticket.looks for ticket in tickets]
    stage.staging.settle()
    assert [t.looks - before for t, before in zip(tickets, looks, strict=True)] == [1] + [0] * 19


def test_a_source_is_lent_to_its_own_device_only() -> None:
    """Else a load to another GPU gets a tensor of the wrong one."""
    stage = Stage()
    blob, departure, _ = stage.depart(ONE)
    assert stage.staging.find(blob, TWO) is None
    lent = stage.staging.find(blob, ONE)
    assert lent is not None
    assert lent.flat is departure.flat


def test_a_source_that_was_lent_is_let_go() -> None:
    """A load has it by then: else it gets nothing when memory runs short, or another thread saves.

    Over CUDA IPC, where the copy does not need the source, so that it is dropped before it landed.
    """
    stage = Stage()
    blob, _ = stage.residency.try_place(PAGE_BYTES, stage.group)
    assert blob is not None
    source = torch.ones(PAGE_BYTES, dtype=torch.uint8)
    departure = Departure(source, Told(), Told(), taken=True)
    departure.device = ONE
    stage.staging.depart(blob, departure, ahead=True)
    lent = stage.staging.find(blob, ONE)
    stage.staging.give_up()
    assert departure.flat is not source
    assert lent is not None
    assert lent.flat is source
    assert stage.staging.find(blob, ONE) is None


def test_a_copy_ahead_goes_to_the_device_of_the_save() -> None:
    """And is handed over once, to a load there; a load elsewhere leaves it."""
    stage = Stage(keep=0)
    one, two = stage.saved(ONE), stage.saved(TWO)
    assert stage.bring()[:2] == (two, TWO)
    assert stage.bring()[:2] == (one, ONE)
    assert stage.staging.next_ahead() is None
    assert stage.staging.find(two, ONE) is None
    assert stage.staging.find(two, TWO) is not None
    assert stage.staging.find(two, TWO) is None


def test_copies_ahead_are_bounded_for_each_device() -> None:
    """Else backward fills a device with what it needs last; and a hand-over makes room again."""
    stage = Stage(keep=0)
    blobs = [stage.saved(ONE) for _ in range(4)]
    brought = [stage.bring()[0] for _ in range(2)]
    assert brought == blobs[:1:-1]
    assert stage.staging.next_ahead() is None
    stage.staging.find(brought[0], ONE)
    assert stage.bring()[0] == blobs[1]


def test_a_copy_ahead_that_is_under_way_outlives_its_blob() -> None:
    """Its memory and its slot are held until it has landed."""
    stage = Stage(keep=0)
    blob = stage.saved(ONE)
    _, _, ticket = stage.bring()
    stage.free(blob)
    assert stage.staging.pending
    assert stage.residency.arena_used_bytes == PAGE_BYTES, "on loan"
    assert not stage.staging.settle()
    ticket.landed = True
    assert stage.staging.settle()
    assert not stage.staging.pending


def test_a_source_that_is_under_way_outlives_its_blob() -> None:
    """The same, off the device."""
    stage = Stage()
    blob, _, ticket = stage.depart(ONE)
    stage.free(blob)
    assert stage.staging.under_way
    assert stage.residency.arena_used_bytes == PAGE_BYTES
    ticket.landed = True
    assert stage.staging.settle()
    assert stage.residency.arena_used_bytes == 0


def test_a_late_look_is_enough_for_a_source_to_go() -> None:
    """A source whose copy has landed unnoticed is let go with the next save; once."""
    stage = Stage(keep=1)
    blob, _, ticket = stage.depart(ONE)
    ticket.landed = True
    stage.depart(ONE)
    assert stage.staging.find(blob, ONE) is None
    assert stage.staging.next_ahead() is None, "it has not landed as far as residency knows"
    assert stage.staging.settle()
    assert stage.bring()[0] == blob


def test_giving_up_drops_what_can_be_had_again_and_no_more() -> None:
    """A source under way is all that there is of its blob."""
    stage = Stage(keep=3)
    landed = stage.saved(ONE)
    under_way, _, ticket = stage.depart(ONE)
    stage.staging.give_up()
    assert stage.staging.find(landed, ONE) is None
    assert stage.staging.find(under_way, ONE) is not None
    assert stage.staging.next_ahead() is None
    stage.free(landed)
    stage.free(under_way)
    ticket.landed = True
    stage.staging.end_cycle()
    stage.saved(ONE)
    stage.saved(ONE)
    stage.staging.give_up()
    stage.staging.end_cycle()
    assert stage.staging.next_ahead() is not None, "the next cycle tries again"


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_shortages_change_nothing_that_was_asked_for(keep: int) -> None:
    """keep_on_device is a number that the user gave."""
    stage = Stage(keep)
    for _ in range(3):
        blobs = [stage.saved(ONE) for _ in range(3)]
        assert len(stage.staging._sources) == keep
        stage.units.short[ONE] += 1
        for blob in blobs:
            stage.free(blob)
        stage.staging.end_cycle()


def test_a_shortage_of_one_device_counts() -> None:
    """Else the device that runs short keeps its source, because another had none."""
    stage = Stage(keep=None)
    blobs = [stage.saved(ONE), stage.saved(TWO)]
    stage.units.short[ONE] += 1
    for blob in blobs:
        stage.free(blob)
    stage.staging.end_cycle()
    stage.saved(TWO)
    assert not stage.staging._sources


def test_copies_that_need_the_daemon_do_not_hide_that_it_is_gone() -> None:
    """Else a call that waits for one would wait for ever."""
    stage = Stage()
    _, _, ticket = stage.depart(ONE)
    assert stage.staging.device_works
    ticket.needs_daemon = True
    assert not stage.staging.device_works


def test_without_devices_there_is_nothing() -> None:
    """A session on the CPU alone asks for none of it."""
    units = NoUnits()
    units.close()
    assert (units.limit_bytes(ONE), units.shortages(ONE)) == (0, 0)
    stage = Stage()
    stage.staging.end_cycle()
    stage.staging.abandon()
    assert not stage.staging.pending
    assert not stage.staging.settle()


def test_a_forked_child_waits_for_nothing() -> None:
    """Each copy is the parent's, whose device is out of reach."""
    stage = Stage(keep=0)
    stage.saved(ONE)
    _, departure, out = stage.depart(ONE)
    _, _, back = stage.bring()
    stage.staging.abandon()
    departure.__del__()
    stage.staging.close()
    assert not out.landed
    assert not back.landed


def test_nothing_is_asked_of_a_device_out_of_reach() -> None:
    """Else a handle that is dropped while a CUDA graph is captured ends the capture."""
    stage = Stage(keep=0)
    blob, _, ticket = stage.depart()
    stage.units.out_of_reach = True
    ticket.landed = True
    looks = ticket.looks
    assert not stage.staging.settle()
    stage.free(blob)
    assert ticket.looks == looks
    assert stage.staging.pending
    stage.units.out_of_reach = False
    assert stage.staging.settle()
    assert not stage.staging.pending
