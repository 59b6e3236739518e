"""Each kind of race between a device's copies and whatever else may happen, one at a time.

On a simulated device (:mod:`tests.helpers.simulated_gpu`). What random orders find is in
``test_device_programs.py``; that anything is found at all, in ``test_simulated_gpu.py``.
"""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from disco_client.devices.interface import Departure
from disco_client.errors import BlobModified, DaemonLost, HandleReleased
from disco_client.residency import Group
from disco_client.session import Session
from disco_client.sharing import Sharing
from discod.wire import PAGE_BYTES
from tests.helpers.device_rig import Rig
from tests.helpers.simulated_gpu import CPU, MODES, SimulatedGpu

every_mode = pytest.mark.parametrize("mode", MODES)
every_seed = pytest.mark.parametrize("seed", range(6))


def page(value: int, pages: int = 1) -> bytes:
    """What a tensor of that value has for bytes."""
    return bytes([value]) * pages * PAGE_BYTES


# Sources


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


# Slots


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


# Copies ahead


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


# Streams and threads


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


# What goes wrong


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_copy_off_the_device(when: str, error: type[BaseException]) -> None:
    """The slot is free again, and nothing writes to it any more."""
    rig = Rig(mode="late", lazy=True, pages=1, keep=0)
    calls = []

    def fail() -> None:
        calls.append(1)
        if len(calls) == (1 if when == "before the copy" else 2):
            raise error

    rig.gpu.fail = fail
    with pytest.raises(error):
        rig.save(rig.value(1))
    assert not rig.gpu._streams[CPU, "out"].queue
    stored = rig.save(rig.value(2))
    assert rig.load_elsewhere(stored) == page(2)
    rig.check()
    assert rig.load_elsewhere(stored) == page(2)
    del stored
    rig.finish()


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_in_the_copy_to_the_device(
    when: str, error: type[BaseException], ahead: bool
) -> None:
    """Nothing writes to the memory any more, the loan ends, and the load may be tried again."""
    rig = Rig(mode="late", lazy=True, keep=0)
    stored = [rig.save(rig.value(value)) for value in (1, 2)]
    rig.machine.finish()
    rig.session.stats()
    calls = []

    def fail() -> None:
        calls.append(1)
        if len(calls) == 1 + 2 * ahead + (when == "after the copy"):
            raise error

    rig.gpu.fail = fail
    with pytest.raises(error):
        stored[1].load()
    rig.gpu.fail = lambda: None
    assert not rig.gpu._streams[CPU, "in"].queue or ahead
    looks = [rig.seen(rig.value(0x77)), *(rig.seen(one.load()) for one in stored)]
    rig.check()
    assert looks == [[page(0x77)], [page(1)], [page(2)]]
    stored.clear()
    rig.finish()


@pytest.mark.parametrize("joined", [False, True])
def test_an_interrupt_when_the_copy_has_been_started(
    monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """The slot would be given to a blob that is read from disk, and the copy write over it."""
    rig = Rig(mode="late", lazy=True, pages=1, keep=0)
    first = rig.save(rig.value(1))
    source = rig.value(2)
    settle = Departure.settle

    def interrupt(departure: Departure) -> None:
        if joined:
            settle(departure)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Departure, "settle", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            rig.save(source, at_once=True)
    view, _ = rig.session.load(first._blob, PAGE_BYTES)
    rig.check()
    assert bytes(view) == page(1)
    del view, caught, first
    rig.finish()


def test_an_interrupt_between_the_copy_and_its_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever drops an arrival waits for it, before its loan and its memory are let go."""
    rig = Rig(mode="late", lazy=True, pages=1, keep=0)
    stored = rig.save(rig.value(1), at_once=True)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "arrive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stored.load()
    look = rig.seen(rig.value(0x77))
    again = rig.seen(stored.load())
    rig.check()
    assert look == [page(0x77)]
    assert again == [page(1)]
    del stored
    rig.finish()


def test_an_interrupt_in_a_wait_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ctrl-C comes most of the time: the copy goes on, and the next call works."""
    rig = Rig(mode="late", keep=0, limit_bytes=1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    stored = rig.save(torch.ones(1024))
    rig.daemon.when_waiting = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.save(torch.zeros(1024))
    with pytest.raises(KeyboardInterrupt):
        rig.load_elsewhere(stored)
    rig.daemon.when_waiting = lambda: None
    assert rig.load_elsewhere(stored) == rig.load_elsewhere(rig.save(torch.ones(1024)))
    del stored
    rig.finish()


def test_copies_end_while_the_daemon_is_away() -> None:
    """What needs no disk needs no daemon: neither a save that waits its turn, nor a load."""
    rig = Rig(mode="late", keep=0, limit_bytes=1, pages=16)
    rig.daemon.away = True
    stored = [rig.save(torch.full((1024,), float(i))) for i in range(4)]
    rig.load_elsewhere(stored[3])
    for value in reversed(range(4)):
        assert torch.equal(stored[value].load(), torch.full((1024,), float(value)))
    rig.daemon.away = False
    stored.clear()
    rig.finish()


@every_mode
@every_seed
def test_a_daemon_that_is_killed_with_copies_under_way(mode: str, seed: int) -> None:
    """Whatever it has begun is begun again by the next one, from slots that nobody else got."""
    rig = Rig(seed, mode, lazy=True, pages=4, keep=0)
    stored, looks = [], []
    for value in range(1, 13):
        stored.append(rig.save(rig.value(value)))
        rig.daemon.away = True
        rig.session.stats()
        rig.daemon.away = False
    for one in reversed(stored):
        looks.append(rig.seen(one.load()))
        rig.daemon.away = True
        rig.session.stats()
        rig.daemon.away = False
    rig.check()
    assert looks == [[page(value)] for value in range(12, 0, -1)]
    rig.daemon.away = True
    filler = [rig.save(rig.value(1)) for _ in range(0)]
    with pytest.raises(DaemonLost):
        filler += [rig.save(rig.value(1)) for _ in range(20)]
    rig.daemon.away = False
    del one
    stored.clear()
    filler.clear()
    rig.finish()


# The end


@every_mode
def test_close_waits_for_copies_and_loaded_tensors_stay(mode: str) -> None:
    """The arena would be unmapped under a copy."""
    rig = Rig(mode=mode, lazy=True, keep=0)
    stored = [rig.save(rig.value(value), at_once=True) for value in (1, 2)]
    loaded = stored[0].load()
    left = rig.save(rig.value(3))
    whole = weakref.ref(rig.arena.view.obj)
    rig.session.close()
    look = rig.seen(loaded)
    rig.check()
    assert look == [page(1)]
    with pytest.raises(HandleReleased, match="detached"):
        stored[1].load()
    with pytest.raises(HandleReleased, match="detached"):
        rig.save(rig.value(4))
    del left, rig, loaded
    stored.clear()
    gc.collect()
    assert whole() is None


def test_close_in_the_middle_of_a_copys_start() -> None:
    """A signal handler or another thread closes: an error, and no copy to what is unmapped."""
    rig = Rig(mode="late", keep=0)
    stored = rig.save(torch.ones(1024), at_once=True)
    rig.machine.finish()
    calls: list[Callable[[], object]] = [rig.session.close]
    rig.gpu.fail = lambda: calls and calls.pop()()  # type: ignore[assignment]
    with pytest.raises(HandleReleased, match="detached"):
        rig.save(torch.ones(1024))
    with pytest.raises(HandleReleased, match="detached"):
        stored.load()
    with pytest.raises(HandleReleased, match="in the middle of this call"):
        rig.gpu.stage_out(torch.ones(4).view(torch.uint8), 0)
    rig.check()


def test_a_copy_that_outlives_the_session_keeps_the_arena() -> None:
    """A copy that another thread starts while one closes is not waited for by close()."""
    rig = Rig(mode="late")
    departure = rig.gpu.stage_out(torch.ones(1024).view(torch.uint8), 0)
    rig.gpu._streams.clear()  # as if it had not been there yet
    rig.session.close()
    rig.check()
    assert departure.landed()


@every_mode
def test_fork_with_copies_under_way(mode: str) -> None:
    """The child must not wait for the parent's device; the parent's copies go on."""
    rig = Rig(mode=mode, lazy=True, keep=1)
    stored = [rig.save(rig.value(value)) for value in (1, 2, 3)]
    loaded = rig.save(rig.value(4), at_once=True).load()
    pid = os.fork()
    if pid == 0:
        try:
            rig.session.after_fork()
            waits = rig.machine.waits
            stored.clear()
            del loaded
            rig.session._staging.__init__(  # type: ignore[misc]
                rig.session._residency, rig.session._transfers, rig.devices, 1
            )
            os._exit(rig.machine.waits != waits)
        except BaseException:  # noqa: BLE001  # not to run the rest of pytest twice
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    looks = [rig.seen(loaded), *(rig.seen(one.load()) for one in stored)]
    rig.check()
    assert looks == [[page(value)] for value in (4, 1, 2, 3)]
    del loaded
    stored.clear()
    rig.finish()


def test_a_tensor_in_parts() -> None:
    """The pinned arena is copied piece by piece: each byte once, and landed with the last."""

    class InParts(SimulatedGpu):
        def _parts(self, start: int, end: int) -> Any:
            for at in range(start, end, 1000):
                yield at, min(end, at + 1000)

    rig = Rig(mode="late", gpu=InParts, keep=0)
    tensor = torch.arange(2048, dtype=torch.int32)
    stored = rig.save(tensor, at_once=True)
    assert torch.equal(stored.load(), tensor)
    assert rig.gpu.copies == 2 * 9
    del stored
    rig.finish()
