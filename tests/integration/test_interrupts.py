"""Ctrl-C and signal handlers at any moment: the call works, or says clearly why it does not."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disco_client
from disco_client import connection
from tests.helpers.daemon import eventually

Attach = Callable[..., None]


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], object], float], None]]:
    """``alarm(action, seconds)`` runs ``action`` in a signal handler of this thread, once."""
    before = signal.getsignal(signal.SIGUSR1)
    timers: list[threading.Timer] = []

    def arm(action: Callable[[], object], seconds: float) -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: action())
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)))
        timers[-1].start()

    yield arm
    for timer in timers:
        timer.cancel()
        timer.join()
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    raise KeyboardInterrupt


def tensors() -> list[torch.Tensor]:
    return [torch.full((1 << 16,), float(i)) for i in range(24)]


def save_and_load(manager: disco_client.DiskOffloadManager) -> None:
    handles = [manager.save_tensor(tensor) for tensor in tensors()]
    for handle, tensor in reversed(list(zip(handles, tensors(), strict=True))):
        assert torch.equal(manager.load_tensor(handle), tensor)
        manager.cleanup_tensor(handle)


def load_all(manager: disco_client.DiskOffloadManager, handles: list[Any]) -> None:
    for handle in handles:
        manager.load_tensor(handle)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment(
    attach: Attach, daemon: Any, alarm: Callable[..., None], seed: int
) -> None:
    """Afterwards everything works, or every call says that it cannot. Nothing hangs or lies."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    save_and_load(manager)
    deadline = time.monotonic() + 1.0  # one that comes in a finalizer is printed, not raised
    try:
        alarm(interrupt, random.Random(seed).random() * 0.05)
        while time.monotonic() < deadline:
            save_and_load(manager)
    except (KeyboardInterrupt, disco_client.UsageError):
        pass
    manager.cleanup()
    try:
        save_and_load(manager)
    except disco_client.UsageError:
        with pytest.raises(disco_client.UsageError, match="interrupted"):
            disco_client.stats()
        disco_client.close()
        disco_client.connect(daemon.socket_dir, arena="2MiB")
        save_and_load(disco_client.DiskOffloadManager())
    # One that comes in a finalizer's first instruction costs that one blob its release.
    assert disco_client.stats().live_blobs <= 1


def test_an_interrupt_while_waiting_leaves_all_well(
    attach: Attach, daemon: Any, alarm: Callable[..., None]
) -> None:
    """Ctrl-C mostly comes while a call waits; the session must then simply go on."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(tensor) for tensor in tensors()]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    os.kill(daemon.pid, signal.SIGSTOP)
    alarm(interrupt, 0.2)
    with pytest.raises(KeyboardInterrupt):
        load_all(manager, handles)
    os.kill(daemon.pid, signal.SIGCONT)
    for handle, tensor in zip(handles, tensors(), strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)


def test_close_in_a_signal_handler(attach: Attach, daemon: Any, alarm: Callable[..., None]) -> None:
    """The usual handler of SIGTERM closes and exits, whatever it interrupts."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(tensor) for tensor in tensors()]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    os.kill(daemon.pid, signal.SIGSTOP)
    session = connection.current().session
    started = time.monotonic()
    alarm(disco_client.close, 0.2)
    with pytest.raises(disco_client.HandleReleased, match="detached"):
        load_all(manager, handles)
    assert time.monotonic() - started < 10
    os.kill(daemon.pid, signal.SIGCONT)
    assert not session.detached, "the interrupted call was still on its fds"
    disco_client.close()
    assert session.detached
    eventually(lambda: not daemon.status()["clients"])


def test_a_call_in_a_signal_handler_inside_another_call(attach: Attach) -> None:
    """The lock is held by the very call that was interrupted: an error, and no deadlock."""
    attach(arena="2MiB")
    session = connection.current().session

    def inside() -> None:
        with pytest.raises(disco_client.UsageError, match="signal handler"):
            disco_client.stats()

    session._monitor.change(inside)
    assert disco_client.stats().live_blobs == 0


def test_a_close_that_was_interrupted_can_be_repeated(
    attach: Attach, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would keep all that the process has, and the second close() do nothing."""
    attach(arena="2MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    held = [manager.save_tensor(torch.zeros(1 << 18)) for _ in range(3)]
    session = connection.current().session

    def interrupted(detach: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session._monitor, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            disco_client.close()
    assert connection.current().session is session
    disco_client.close()
    eventually(lambda: not daemon.status()["clients"])
    eventually(lambda: not daemon.status()["disk_used_bytes"])
    del held
