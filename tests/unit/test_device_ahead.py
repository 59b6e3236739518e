"""Races of copies back to the device ahead of need, on several streams and threads.

On a simulated device (:mod:`tests.helpers.simulated_gpu`). What random orders find is in
``test_device_programs.py``; that anything is found at all, in ``test_simulated_gpu.py``.
"""

import threading
from typing import Any

import pytest
import torch

from disco_client.residency import Group
from discod.wire import PAGE_BYTES
from tests.helpers.device_rig import Rig, page
from tests.helpers.simulated_gpu import CPU, MODES, SimulatedGpu

every_mode = pytest.mark.parametrize("mode", MODES)
every_seed = pytest.mark.parametrize("seed", range(6))


@every_mode
@every_seed
def test_copies_ahead_are_what_loads_ask_for_next(mode: str, seed: int) -> None:
    """Else backward waits for each copy; and what comes back is exact, whatever was evicted."""
    rig = Rig(seed, mode, lazy=True, pages=5, keep=0, limit_bytes=2 * PAGE_BYTES)
    stored = [rig.save(rig.value(value)) for value in range(1, 11)]
    rig.machine.finish()
    rig.session.stats()
    looks = []
    for one in reversed(stored):
        looks.append(rig.seen(one.load()))
        ahead = list(rig.session._staging._ahead)
        left = [other._blob for other in stored[: stored.index(one)]]
        assert ahead == left[::-1][: len(ahead)]
        assert len(ahead) <= 2
    rig.check()
    assert looks == [[page(value)] for value in range(10, 0, -1)]
    assert rig.session.stats().device_hits > 0
    del one
    stored.clear()
    rig.finish()


def brought_ahead(mode: str = "late", **settings: Any) -> tuple[Rig, list[Any]]:
    """A rig in which a load has had copies ahead started, and what is not loaded yet."""
    rig = Rig(mode=mode, lazy=True, keep=0, **settings)
    stored = [rig.save(rig.value(value)) for value in range(1, 6)]
    rig.machine.finish()
    rig.session.stats()
    stored.pop().load()
    return rig, stored


@every_mode
def test_a_graph_that_is_dropped_drops_its_copies_ahead(mode: str) -> None:
    """Else they hold the device's memory; slots and memory are free once they have landed."""
    rig, stored = brought_ahead(mode)
    assert len(rig.session._staging._ahead) == 4
    stored.clear()
    rig.session.stats()
    assert not rig.session._staging._ahead
    for value in range(8):
        one = rig.save(rig.value(value))
        assert rig.load_elsewhere(one) == page(value)
        del one
    rig.finish()


def test_no_copy_ahead_for_a_manager_that_wants_none() -> None:
    """prefetch_to_gpu=False."""
    rig = Rig(mode="early", keep=0)
    group = Group(to_device=False)
    stored = [rig.save(torch.ones(1024), group=group) for _ in range(4)]
    stored.pop().load()
    assert not rig.session._staging._ahead
    stored.clear()
    rig.finish()


@every_mode
def test_a_copy_ahead_that_finds_no_memory_gives_up_all_of_them(mode: str) -> None:
    """They are the first to go, for the rest of the cycle; the loads are right without them."""
    rig, stored = brought_ahead(mode, limit_bytes=2 * PAGE_BYTES)
    assert len(rig.session._staging._ahead) == 2
    looks = [rig.seen(stored.pop().load())]
    rig.gpu.out_of_memory = 1
    looks.append(rig.seen(stored.pop().load()))
    assert not rig.session._staging._ahead
    copies = rig.gpu.copies
    looks.append(rig.seen(stored.pop().load()))
    assert rig.gpu.copies == copies + 1
    rig.check()
    assert looks == [[page(value)] for value in (4, 3, 2)]
    stored.clear()
    rig.finish()
    assert not rig.session._staging._short


@every_mode
def test_a_load_that_finds_no_memory_frees_what_can_be_had_again(mode: str) -> None:
    """Copies ahead, sources, and whatever copies under way hold; then it is tried once more."""
    rig = Rig(mode=mode, keep=3, pages=32)
    stored = [rig.save(torch.full((1024,), float(i))) for i in range(6)]
    rig.gpu.out_of_memory = 1
    assert torch.equal(stored[0].load(), torch.zeros(1024))
    first = stored[0]
    by_hand = rig.save(torch.full((1024,), 9.0), at_once=True)
    rig.gpu.out_of_memory = 1
    assert torch.equal(by_hand.load(), torch.full((1024,), 9.0))
    staging = rig.session._staging
    assert not staging._sources
    assert not staging._ahead
    rig.gpu.out_of_memory = 2
    with pytest.raises(torch.OutOfMemoryError):
        by_hand.load()
    assert torch.equal(by_hand.load(), torch.full((1024,), 9.0))
    assert torch.equal(first.load(), torch.zeros(1024))
    del by_hand, first
    stored.clear()
    rig.finish()


def test_a_load_that_finds_no_memory_waits_for_the_copies_that_hold_it() -> None:
    """Sources are held until they have landed, so dropping what need not stay is not enough."""

    class Full(SimulatedGpu):
        def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
            if not self.machine.idle:
                raise torch.OutOfMemoryError("simulated: sources have it")
            return super()._allocate(nbytes, device)

    rig = Rig(mode="late", gpu=Full, keep=0)
    stored = [rig.save(torch.full((1024,), float(i)), at_once=i == 0) for i in range(4)]
    assert torch.equal(stored[0].load(), torch.zeros(1024))
    stored.clear()
    rig.finish()


@every_seed
def test_a_load_on_another_stream_than_the_copy_ahead(seed: int) -> None:
    """Its memory would be given away while a kernel that is queued there still reads it."""
    rig, stored = brought_ahead("random" if seed else "late")
    other = rig.machine.compute_stream()
    with rig.machine.stream(other):
        looks = [rig.seen(stored.pop().load()) for _ in range(4)]
    for _ in range(12):
        rig.value(0xEE)
    rig.machine.current_stream(CPU).synchronize()
    rig.check()
    assert looks == [[page(value)] for value in (4, 3, 2, 1)]
    rig.finish()


@pytest.mark.parametrize("saved_on_it", [False, True])
def test_a_source_that_is_lent_on_another_stream_than_its_memory_is_of(saved_on_it: bool) -> None:
    """The same, of the saved tensor's own memory."""
    rig = Rig(mode="late", lazy=True, keep=3)
    origin, other = rig.machine.current_stream(CPU), rig.machine.compute_stream()
    source = rig.value(7)
    other.wait_stream(origin)
    with rig.machine.stream(other if saved_on_it else origin):
        stored = rig.save(source)
    with rig.machine.stream(other):
        look = rig.seen(stored.load())
    rig.machine._streams[2].synchronize()  # the copy off the device
    del source, stored
    rig.session.stats()
    rig.value(0xEE)
    origin.synchronize()
    rig.check()
    assert look == [page(7)]
    rig.finish()


@every_mode
def test_threads_with_streams_of_their_own(mode: str) -> None:
    """One arena, one daemon, one pair of side streams; every value is its thread's."""
    rig = Rig(mode=mode, lazy=True, pages=6, keep=1, limit_bytes=2 * PAGE_BYTES)
    wrong: list[Any] = []

    def work(thread: int) -> None:
        looks = []
        try:
            with rig.machine.stream(rig.machine.compute_stream()):
                for turn in range(8):
                    values = [thread * 50 + turn * 4 + i for i in range(4)]
                    stored = [rig.save(rig.value(v), at_once=v % 3 == 0) for v in values]
                    rig.value(0xEE)
                    for one, value in reversed(list(zip(stored, values, strict=True))):
                        looks.append((rig.seen(one.load()), value))
                    del one
                    stored.clear()
                rig.machine.current_stream(CPU).synchronize()
            wrong.extend(value for found, value in looks if found != [page(value)])
        except BaseException as error:  # noqa: BLE001  # for the main thread to see
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    rig.finish()
