"""The simulation catches what it is for: it finds faults without any one of the protections.

Each test takes one protection away, and the random programs that are green with it must not be so
without it.
"""

from typing import Any

import pytest
import torch

from disco_client.devices.interface import Arrival, Departure, Lent, _Copy
from disco_client.residency import Residency
from disco_client.staging import Staging
from tests.helpers.device_programs import EagerProgram, LazyProgram, Program, run
from tests.helpers.device_rig import Rig
from tests.helpers.simulated_gpu import CPU, Machine, Memory, SimulatedGpu, Stream

SEEDS = 40


def caught(
    kind: type[Program] = LazyProgram,
    modes: tuple[str, ...] = ("late", "random"),
    seeds: int = SEEDS,
    **rig: Any,
) -> list[str]:
    """The faults of the first program that has any."""
    for seed in range(seeds):
        for mode in modes:
            faults = run(kind, seed, mode, **rig)
            if faults:
                return faults
    return []


class NoWait(SimulatedGpu):
    """Copies that do not wait for the stream whose memory they use."""

    direction: str

    def _side_stream(self, device: torch.device, direction: str) -> Any:
        stream = super()._side_stream(device, direction)
        if direction == self.direction:
            stream.wait_event = stream.wait_stream = lambda other: None
        return stream


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_copy_that_does_not_wait_for_the_computation(direction: str) -> None:
    """Out: bytes of before the kernel. In: a kernel that is queued still uses the memory."""
    gpu = type("NoWaitThatWay", (NoWait,), {"direction": direction})
    modes = ("early", "random") if direction == "out" else ("random",)
    assert caught(modes=modes, gpu=gpu)


@pytest.mark.parametrize("kind", [LazyProgram, EagerProgram])
def test_a_source_that_is_not_held(monkeypatch: pytest.MonkeyPatch, kind: type[Program]) -> None:
    """Its memory is another tensor's when the copy reads it."""
    init = Departure.__init__

    def let_go(self: Departure, flat: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        init(self, flat, *args, **kwargs)
        self.lendable = False
        self.flat = torch.empty(0)

    monkeypatch.setattr(Departure, "__init__", let_go)
    monkeypatch.setattr(Departure, "changed", False)
    assert caught(kind)


@pytest.mark.parametrize("kind", [LazyProgram, EagerProgram])
def test_a_loan_that_ends_before_the_copy(
    monkeypatch: pytest.MonkeyPatch, kind: type[Program]
) -> None:
    """The slot is another blob's when the copy reads it."""
    arrive = Staging.arrive
    monkeypatch.setattr(
        Staging, "arrive", lambda self, arrival, memory: arrive(self, arrival, memoryview(b""))
    )
    assert caught(kind, pages=4, keep=0)


def test_memory_that_is_not_held_until_it_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another tensor's when the copy writes it."""
    monkeypatch.setattr(Staging, "arrive", lambda self, arrival, memory: None)
    monkeypatch.setattr(Arrival, "join", lambda self: None)
    monkeypatch.delattr(_Copy, "__del__")
    assert any("freed" in fault for fault in caught(EagerProgram, keep=0))


@pytest.mark.parametrize("kind", [LazyProgram, EagerProgram])
def test_a_change_of_the_source_that_nobody_notices(
    monkeypatch: pytest.MonkeyPatch, kind: type[Program]
) -> None:
    """The copy has bytes of after the save."""
    monkeypatch.setattr(Departure, "changed", False)
    assert caught(kind)


@pytest.mark.parametrize("kind", [LazyProgram, EagerProgram])
def test_a_save_by_hand_that_the_computation_does_not_wait_for(
    monkeypatch: pytest.MonkeyPatch, kind: type[Program]
) -> None:
    """The same, where the change would have to be harmless."""

    def settle(self: Departure) -> None:
        self.lendable = False
        self._exact = True

    monkeypatch.setattr(Departure, "settle", settle)
    assert caught(kind)


@pytest.mark.parametrize("kind", [LazyProgram, EagerProgram])
def test_memory_that_is_used_before_it_arrived(
    monkeypatch: pytest.MonkeyPatch, kind: type[Program]
) -> None:
    """A kernel reads what was there before."""
    monkeypatch.setattr(Arrival, "join", lambda self: None)
    assert caught(kind, keep=0)


def test_a_source_that_is_used_before_it_has_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of another stream reads what was there before."""
    monkeypatch.setattr(Lent, "join", lambda self: None)
    assert caught(keep=3)


def test_memory_that_is_used_on_a_stream_the_allocator_knows_nothing_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is given away while a kernel that is queued there still reads it."""
    monkeypatch.setattr(Memory, "record", lambda self, tensor, stream: None)
    assert caught()


def test_a_slot_that_is_thought_full_before_the_copy_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is written to disk, loaded and given away with whatever is in it."""
    depart = Staging.depart

    def land_at_once(self: Staging, blob: int, departure: Departure, ahead: bool) -> None:
        depart(self, blob, departure, ahead)
        self._transfers.carry_out(self._residency.filled(blob))
        del self._leaving[departure.device], self._leaving_bytes[departure.device]
        forgotten.append(departure)

    forgotten: list[Departure] = []
    monkeypatch.setattr(Staging, "depart", land_at_once)
    assert caught(pages=4)


def test_a_slot_of_a_freed_blob_that_is_given_away_before_the_copy_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy writes over another blob."""
    free = Residency.free

    def free_at_once(self: Residency, blob: int) -> Any:
        record = self._held.blobs[blob]
        record.filling, filling = False, record.filling
        self._held.in_flight -= filling
        return free(self, blob)

    filled = Residency.filled

    def filled_if_known(self: Residency, blob: int, spoilt: bool = False) -> Any:
        return filled(self, blob, spoilt) if blob in self._held.blobs else []

    monkeypatch.setattr(Residency, "free", free_at_once)
    monkeypatch.setattr(Residency, "filled", filled_if_known)
    assert caught(pages=4)


def test_a_copy_that_is_dropped_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the middle of a load, its memory is another tensor's."""
    monkeypatch.delattr(_Copy, "__del__")
    monkeypatch.setattr(Staging, "arrive", _fail)
    rig = Rig(mode="late")
    stored = rig.save(torch.ones(1024), at_once=True)
    with pytest.raises(ValueError, match="simulated"):
        stored.load()
    rig.machine.finish()
    assert any("freed" in violation for violation in rig.machine.violations)


def _fail(*args: Any) -> None:
    raise ValueError("simulated")


def test_an_arena_that_is_unmapped_under_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy writes to whatever is mapped there by then."""
    monkeypatch.setattr(SimulatedGpu, "close", lambda self: None)
    rig = Rig(mode="late")
    monkeypatch.setattr(rig.gpu, "_mapping", lambda: rig.arena.view)
    departure = rig.gpu.stage_out(torch.ones(1024).view(torch.uint8), 0)
    departure._ticket._arena = None  # type: ignore[attr-defined]
    rig.session.close()
    rig.machine.finish()
    assert any("unmapped" in violation for violation in rig.machine.violations)


# The simulation itself


@pytest.mark.parametrize("mode", ["early", "late", "random"])
@pytest.mark.parametrize("seed", range(5))
def test_order_within_and_between_streams(mode: str, seed: int) -> None:
    """Else it would find faults where there are none, or pass what no GPU would."""
    machine = Machine(seed, mode, lazy=True)
    one, two = machine.compute_stream(), machine.compute_stream()
    done: list[str] = []

    def put(stream: Stream, name: str) -> None:
        stream.give(lambda: done.append(name))

    put(one, "a")
    put(two, "x")
    event = one.record_event()
    put(one, "b")
    two.wait_event(event)
    put(two, "y")
    one.wait_stream(two)
    put(one, "c")
    machine.finish()
    assert sorted(done) == ["a", "b", "c", "x", "y"]
    assert [name for name in done if name in "abc"] == ["a", "b", "c"]
    assert done.index("a") < done.index("y") > done.index("x")
    assert done.index("y") < done.index("c")


def test_as_late_as_possible_is_only_what_is_forced() -> None:
    """Else a copy that the client has to wait for lands by itself."""
    machine = Machine(mode="late", lazy=True)
    one, two = machine.compute_stream(), machine.compute_stream()
    done: list[int] = []
    one.give(lambda: done.append(1))
    first = one.record_event()
    one.give(lambda: done.append(2))
    two.wait_event(first)
    two.give(lambda: done.append(3))
    assert done == []
    two.synchronize()
    assert done == [1, 3]


def test_a_query_that_is_repeated_comes_true() -> None:
    """Else a client that polls would hang."""
    machine = Machine(mode="late", lazy=True)
    stream = machine.compute_stream()
    stream.give(lambda: None)
    event = stream.record_event()
    answers = [event.query() for _ in range(100)]
    assert answers[0] is False
    assert answers[-1] is True


def test_memory_is_given_out_again_at_once_and_only_to_its_stream() -> None:
    """Else a source that is freed too early would keep its value by luck."""
    machine = Machine(mode="late", lazy=True)
    memory = Memory(machine)
    one, two = machine.current_stream(CPU), machine.compute_stream()
    tensor = memory.empty(4096)
    address = tensor.data_ptr()
    view = tensor.view(torch.int64)[1:]
    del tensor
    assert memory.empty(4096).data_ptr() != address
    del view
    with machine.stream(two):
        assert memory.empty(4096).data_ptr() != address
    again = memory.empty(4096)
    assert again.data_ptr() == address
    two.give(lambda: None)
    memory.record(again, two)
    del again
    other = memory.empty(4096)
    assert other.data_ptr() != address
    two.synchronize()
    assert memory.empty(4096).data_ptr() == address
    assert one is not two


def test_nothing_is_caught_where_nothing_is_taken_away() -> None:
    """Else the tests above would pass whatever they take away."""
    assert caught(seeds=10, pages=4) == []
    assert caught(EagerProgram, seeds=10, keep=0) == []
