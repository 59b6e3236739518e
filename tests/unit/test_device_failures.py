"""Copies under way when something fails, is interrupted, or ends.

On a simulated device (:mod:`tests.helpers.simulated_gpu`). What random orders find is in
``test_device_programs.py``; that anything is found at all, in ``test_simulated_gpu.py``.
"""

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_client.devices.interface import Departure
from disco_client.errors import DaemonLost, HandleReleased
from disco_client.session import Session
from discod.wire import PAGE_BYTES
from tests.helpers.device_rig import Rig, page
from tests.helpers.simulated_gpu import CPU, MODES, SimulatedGpu

every_mode = pytest.mark.parametrize("mode", MODES)
every_seed = pytest.mark.parametrize("seed", range(6))


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
