"""Ctrl-C and signal handlers at any moment: the call works, or says clearly why it does not."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import disco_client
from disco_client import connection
from tests.helpers import nursery
from tests.helpers.daemon import eventually
from tests.helpers.jobs import ROOT

Attach = Callable[..., None]


def alarm(call: Callable[[], object], action: Callable[[], object], seconds: float) -> None:
    """``call()``, and in the midst of it, once, ``action()`` in a signal handler of this thread.

    Where the signal comes too late it does nothing: ``action`` must not reach the test's runner.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is inside.__code__:
                action()
                return
            frame = frame.f_back

    def inside() -> None:
        call()

    signal.signal(signal.SIGUSR1, handle)  # and it stays: one that is late would end the process
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        inside()
    finally:
        timer.cancel()
        timer.join()


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
def test_an_interrupt_at_any_moment(attach: Attach, daemon: Any, seed: int) -> None:
    """Afterwards everything works, or every call says that it cannot. Nothing hangs or lies."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    save_and_load(manager)
    deadline = time.monotonic() + 1.0  # one that comes in a finalizer is printed, not raised

    def until_then() -> None:
        while time.monotonic() < deadline:
            save_and_load(manager)

    with contextlib.suppress(KeyboardInterrupt, disco_client.UsageError):
        alarm(until_then, interrupt, random.Random(seed).random() * 0.05)
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


def test_an_interrupt_while_waiting_leaves_all_well(attach: Attach, daemon: Any) -> None:
    """Ctrl-C mostly comes while a call waits; the session must then simply go on."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(tensor) for tensor in tensors()]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    os.kill(daemon.pid, signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt):
        alarm(lambda: load_all(manager, handles), interrupt, 0.2)
    os.kill(daemon.pid, signal.SIGCONT)
    for handle, tensor in zip(handles, tensors(), strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)


def test_close_in_a_signal_handler(attach: Attach, daemon: Any) -> None:
    """The usual handler of SIGTERM closes and exits, whatever it interrupts."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(tensor) for tensor in tensors()]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    os.kill(daemon.pid, signal.SIGSTOP)
    session = connection.current().session
    started = time.monotonic()
    with pytest.raises(disco_client.HandleReleased, match="detached"):
        alarm(lambda: load_all(manager, handles), disco_client.close, 0.2)
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


ROUNDS = 40


@pytest.mark.parametrize("seed", range(2))
def test_a_shower_of_interrupts(daemon: Any, seed: int) -> None:
    """Each Ctrl-C in connect() or close() would leave fds and threads until the process ends.

    In a process of its own: none of them may reach this one.
    """
    command = (str(ROOT / "tests/helpers/shower.py"), daemon.socket_dir, str(seed), str(ROUNDS))
    process = nursery.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=90)
    finally:
        process.close()
    assert process.returncode == 0, err
    seen, fds, threads, fds_then, threads_then = map(int, out.split())
    assert seen > ROUNDS / 4, "too few to say anything"
    assert fds_then <= fds, err
    assert threads_then <= threads, err
    eventually(lambda: not daemon.status()["clients"])
    assert not daemon.status()["disk_used_bytes"]
    assert not daemon.status()["ram_used_bytes"]


def test_an_attach_that_is_interrupted_is_undone(daemon: Any) -> None:
    """A daemon that is slow to answer: Ctrl-C must neither wait for it nor leave a client."""
    os.kill(daemon.pid, signal.SIGSTOP)
    fds = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            alarm(lambda: disco_client.connect(daemon.socket_dir, arena="2MiB"), interrupt, 0.2)
        assert time.monotonic() - began < 2
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    disco_client.connect(daemon.socket_dir, arena="2MiB")
    save_and_load(disco_client.DiskOffloadManager())
    assert len(daemon.status()["clients"]) == 1
    disco_client.close()
    eventually(lambda: not daemon.status()["clients"])
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)


def test_close_in_a_signal_handler_inside_connect(daemon: Any) -> None:
    """It would wait for ever for the call that it has interrupted; or leave that one attached."""
    os.kill(daemon.pid, signal.SIGSTOP)

    def close() -> None:
        disco_client.close()
        os.kill(daemon.pid, signal.SIGCONT)

    with pytest.raises(disco_client.UsageError, match="signal handler"):
        alarm(lambda: disco_client.connect(daemon.socket_dir, arena="2MiB"), close, 0.2)
    assert not disco_client.stats().saved_blobs
    eventually(lambda: not daemon.status()["clients"])
