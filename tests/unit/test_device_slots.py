"""Races of places in the arena, while copies to and from them are under way.

On a simulated device (:mod:`tests.helpers.simulated_gpu`). What random orders find is in
``test_device_programs.py``; that anything is found at all, in ``test_simulated_gpu.py``.
"""

import pytest
import torch

from discod.wire import PAGE_BYTES
from tests.helpers.device_rig import Rig, page
from tests.helpers.simulated_gpu import MODES

every_mode = pytest.mark.parametrize("mode", MODES)
every_seed = pytest.mark.parametrize("seed", range(6))


@every_mode
@every_seed
def test_a_slot_is_not_written_before_the_copy_has_landed(mode: str, seed: int) -> None:
    """The disk would get what was in the slot before."""
    rig = Rig(seed, mode, lazy=True, pages=3, keep=0)
    stored = [rig.save(rig.value(value)) for value in range(1, 11)]
    assert rig.daemon.writes > 0
    assert [rig.load_elsewhere(one) for one in stored] == [page(v) for v in range(1, 11)]
    stored.clear()
    rig.finish()


@every_mode
def test_a_slot_of_a_freed_blob_stays_until_the_copy_has_landed(mode: str) -> None:
    """The copy would write over the next blob."""
    rig = Rig(mode=mode, lazy=True, pages=2, keep=0)
    other = rig.save(rig.value(9))
    for value in range(1, 6):
        stored = rig.save(rig.value(value))
        del stored
        if mode == "late":
            assert rig.session._residency.arena_used_bytes == 2 * PAGE_BYTES
        kept = rig.save(rig.value(value + 100))
        assert rig.load_elsewhere(kept) == page(value + 100)
        del kept
    assert rig.load_elsewhere(other) == page(9)
    del other
    rig.finish()


@every_mode
@every_seed
def test_a_slot_stays_until_the_copy_from_it_has_landed(mode: str, seed: int) -> None:
    """What is saved next would be loaded in its place."""
    rig = Rig(seed, mode, lazy=True, pages=2, keep=0)
    looks = []
    for value in range(1, 9):
        stored = rig.save(rig.value(value), at_once=True)
        tensor = stored.load()
        del stored
        looks.append(rig.seen(tensor))
        del tensor
        rig.save(rig.value(0xEE))
    rig.check()
    assert looks == [[page(value)] for value in range(1, 9)]
    rig.finish()


@every_mode
@every_seed
def test_memory_of_a_load_that_is_dropped_at_once(mode: str, seed: int) -> None:
    """The copy would write over the tensor that has the memory next."""
    rig = Rig(seed, mode, lazy=True, pages=4, keep=0)
    stored = [rig.save(rig.value(value), at_once=True) for value in range(1, 4)]
    looks = []
    for one in stored * 3:
        one.load()
        tensor = rig.value(0x77)
        looks.append(rig.seen(tensor))
        del tensor
    rig.check()
    assert looks == [[page(0x77)]] * 9
    del one
    stored.clear()
    rig.finish()


@every_mode
@pytest.mark.parametrize("pages", [2, 3, 4])
def test_an_arena_in_which_every_load_waits(mode: str, pages: int) -> None:
    """Room comes when copies end: no error, and no hang."""
    rig = Rig(mode=mode, lazy=True, pages=pages, keep=0)
    stored = [rig.save(rig.value(value, 2), at_once=True) for value in range(1, 7)]
    looks = [rig.seen(one.load()) for one in stored * 2]
    rig.check()
    assert looks == [[page(value, 2)] for value in range(1, 7)] * 2
    stored.clear()
    rig.finish()


@pytest.mark.parametrize("limit", [1, PAGE_BYTES, 3 * PAGE_BYTES])
def test_copies_off_the_device_are_bounded(limit: int) -> None:
    """Else a slow arena fills the device with sources; the oldest is what a save waits for."""
    rig = Rig(mode="late", limit_bytes=limit, keep=0, pages=32)
    stored = []
    for value in range(8):
        stored.append(rig.save(torch.full((1024,), float(value))))
        (copies,) = rig.session._staging._leaving.values()
        most = max(1, limit // PAGE_BYTES)
        assert [blob for blob, _ in copies] == list(range(max(0, value - most + 1), value + 1))
    stored.clear()
    rig.finish()
