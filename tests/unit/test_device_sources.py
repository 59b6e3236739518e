"""Races of a saved tensor's own memory: freed, changed, given away, lent, kept.

On a simulated device (:mod:`tests.helpers.simulated_gpu`). What random orders find is in
``test_device_programs.py``; that anything is found at all, in ``test_simulated_gpu.py``.
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from disco_client.errors import BlobModified
from disco_client.sharing import Sharing
from tests.helpers.device_rig import Rig, page
from tests.helpers.simulated_gpu import MODES

every_mode = pytest.mark.parametrize("mode", MODES)
every_seed = pytest.mark.parametrize("seed", range(6))


@every_mode
@every_seed
def test_a_source_that_is_freed_and_overwritten(mode: str, seed: int) -> None:
    """Its memory is given to the next tensor of its stream, before the copy has run."""
    rig = Rig(seed, mode, lazy=True, keep=0)
    stored = [rig.save(rig.value(value)) for value in range(1, 9)]
    for _ in range(10):
        rig.value(0xEE)
    assert [rig.load_elsewhere(one) for one in stored] == [page(v) for v in range(1, 9)]
    stored.clear()
    rig.finish()


@every_mode
@every_seed
@pytest.mark.parametrize("at_once", [False, True])
def test_a_source_that_is_changed_in_place(mode: str, seed: int, at_once: bool) -> None:
    """By hand it is saved as it was; else as it was, or every load says that it is not."""
    rig = Rig(seed, mode, lazy=True, keep=seed % 3)
    sources = [rig.value(value) for value in range(1, 7)]
    stored = [rig.save(source, at_once=at_once) for source in sources]
    for source in sources:
        rig.change(source, 0xEE)
    looks: list[tuple[int, list[bytes]]] = []
    lost: list[int] = []

    def look(value: int) -> None:
        try:
            looks.append((value, rig.seen(stored[value - 1].load())))
            looks.append((value, [rig.load_elsewhere(stored[value - 1])]))
        except BlobModified:
            lost.append(value)

    for value in range(1, 7):
        look(value)
    rig.check()
    assert all(found == [page(value)] for value, found in looks)
    assert lost == [] if at_once else len(looks) + len(lost) >= 6
    stored.clear()
    rig.finish()


@every_mode
def test_a_source_whose_storage_is_given_away(mode: str) -> None:
    """FSDP resizes storages to 0: the copy has rubbish, and every load says so."""
    rig = Rig(mode=mode, keep=0)
    rig.machine.tolerates_shrunk = True
    source = torch.full((1024,), 3.0)
    stored = rig.save(source)
    source.untyped_storage().resize_(0)
    with pytest.raises(BlobModified, match="memory given away"):
        rig.load_elsewhere(stored)
    with pytest.raises(BlobModified, match="memory given away"):
        stored.load()
    assert rig.session._residency.arena_used_bytes == 0
    del stored
    rig.finish()


@every_mode
def test_a_source_that_is_changed_after_it_landed_is_not_lent(mode: str) -> None:
    """It is one of the newest saves, so it is still held, with another value by now."""
    rig = Rig(mode=mode, keep=3)
    source = torch.full((1024,), 3.0)
    stored = rig.save(source)
    rig.machine.finish()
    rig.session.stats()
    source.add_(1)
    assert torch.equal(stored.load(), torch.full((1024,), 3.0))
    del stored
    rig.finish()


@pytest.mark.parametrize("landed", [False, True])
def test_a_subclass_that_is_changed_in_place(landed: bool) -> None:
    """Its parts do not count that, of a DTensor as little: else the load gives the new value."""
    rig = Rig(mode="late", keep=3)
    whole = TwoTensor(torch.full((1024,), 3.0), torch.zeros(1024))
    stored, _ = Sharing(rig.store).store(whole.a, rig.group, whole)
    if landed:
        rig.machine.finish()
        rig.session.stats()
    whole.add_(1)
    assert whole.a[0] == 4.0
    if landed:
        assert torch.equal(stored.load(), torch.full((1024,), 3.0))
    else:
        with pytest.raises(BlobModified):
            stored.load()
    del stored
    rig.finish()


def test_a_load_before_the_landing_gets_the_source_itself() -> None:
    """Else backward waits for a copy off the device and another one back, for nothing."""
    rig = Rig(mode="late", lazy=True)
    source = rig.value(7)
    stored = rig.save(source)
    copies = rig.gpu.copies
    assert stored.load().data_ptr() == source.data_ptr()
    assert rig.gpu.copies == copies
    assert rig.session.stats().device_hits == 1
    assert rig.machine.waits == 0
    del stored
    rig.finish()


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_saved_by_hand_is_loaded_into_memory_of_its_own(lazy: bool) -> None:
    """Else the caller's tensor changes with what was loaded."""
    rig = Rig(mode="late", lazy=lazy)
    source = rig.value(7)
    stored = rig.save(source, at_once=True)
    loaded = stored.load()
    assert loaded.data_ptr() != source.data_ptr()
    del stored
    rig.finish()


@every_mode
def test_an_inference_tensor_is_not_lent(mode: str) -> None:
    """It tells nobody of its changes, and autograd cannot use it."""
    rig = Rig(mode=mode, keep=3)
    with torch.inference_mode():
        source = torch.full((1024,), 3.0)
        stored = rig.save(source)
    rig.machine.finish()
    rig.session.stats()
    with torch.inference_mode():
        source.add_(1)
    loaded = stored.load()
    assert not loaded.is_inference()
    assert torch.equal(loaded, torch.full((1024,), 3.0))
    del stored
    rig.finish()


@pytest.mark.parametrize(("keep", "held"), [(0, 0), (1, 1), (3, 3), (None, 1)])
def test_how_many_sources_stay(keep: int | None, held: int) -> None:
    """Those that have not landed, and of the others as many as ``keep_on_device`` says."""
    rig = Rig(mode="late", keep=keep)
    sources = [torch.full((1024,), float(i)) for i in range(6)]
    storages = [StorageWeakRef(source.untyped_storage()) for source in sources]
    stored = [rig.save(source) for source in sources]
    sources.clear()
    assert not any(storage.expired() for storage in storages)
    rig.machine.finish()
    rig.session.stats()
    assert [storage.expired() for storage in storages] == [True] * (6 - held) + [False] * held
    copies = rig.gpu.copies
    for one in stored[6 - held :]:
        one.load()
    assert rig.session.stats().device_hits == held
    assert rig.gpu.copies - copies <= 6 - held, "a source was copied, not lent"
    stored.clear()
    one = None
    rig.finish()


def test_no_source_stays_after_a_cycle_that_was_short_of_memory() -> None:
    """Else the tensor that stays is the one too many; it stays again when all is well."""
    rig = Rig(mode="early", keep=None)
    held = []
    for short in (False, True, False, False):
        stored = [rig.save(torch.ones(1024)) for _ in range(3)]
        rig.session.stats()
        held.append(len(rig.session._staging._sources))
        rig.gpu.shortages_so_far += short
        stored.clear()
        rig.session.stats()
    assert held == [1, 1, 0, 1]
    rig.finish()
