"""Copies to and from a simulated accelerator under way when a daemon, call or process ends."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disco_client
from disco_client import connection
from disco_client.residency import Group
from disco_client.stored import StoredTensor
from tests.helpers import nursery
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.simulated_attachment import attach_simulated
from tests.helpers.simulated_gpu import MODES, SimulatedGpu

SIZE = 2048
"""Of float32: two pages, so that the arena holds eight."""
GROUP = Group()


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    """No attachment is left."""
    yield
    disco_client.close()


def tensors(count: int = 24) -> list[torch.Tensor]:
    """Different ones."""
    return [torch.full((SIZE,), float(i)) for i in range(count)]


def save(tensor: torch.Tensor) -> StoredTensor:
    """As autograd's hooks save it: its copy may not have landed for long."""
    return StoredTensor(connection.current().store, tensor, GROUP)


def save_all(count: int = 24) -> list[StoredTensor]:
    """All of :func:`tensors`, whose own memory is then free."""
    return [save(tensor) for tensor in tensors(count)]


def check_all(saved: list[StoredTensor]) -> None:
    """Load and free them, newest first."""
    expected = tensors(len(saved))
    while saved:
        assert torch.equal(saved.pop().load(), expected.pop())


def clean(gpu: SimulatedGpu) -> bool:
    """Whether all copies that were started end well."""
    gpu.machine.finish()
    return gpu.machine.violations == []


@pytest.mark.parametrize("mode", MODES)
def test_daemon_killed_and_started_again(
    daemon: Daemon, start_daemon: Callable[..., Daemon], mode: str
) -> None:
    """The step completes over a new daemon, with copies each way when the old one dies."""
    gpu = attach_simulated(daemon.socket_dir, mode, reconnect_timeout=20.0)
    saved = save_all(12)
    daemon.kill()
    second = start_daemon(scratch=daemon.scratch, socket_dir=daemon.socket_dir)
    saved += [save(tensor) for tensor in tensors()[12:]]
    expected = tensors()
    while saved:
        if len(saved) == 14:
            second.kill()
            start_daemon(scratch=daemon.scratch, socket_dir=daemon.socket_dir)
        assert torch.equal(saved.pop().load(), expected.pop())
    assert clean(gpu)
    assert disco_client.stats().read_bytes > 0


@pytest.mark.parametrize("mode", MODES)
def test_close_and_attach_again(daemon: Daemon, mode: str) -> None:
    """What was loaded stays, what was saved is gone, and the next attachment is not disturbed."""
    before = attach_simulated(daemon.socket_dir, mode)
    saved = save_all(12)
    loaded = saved[3].load()
    disco_client.close()
    assert torch.equal(loaded, tensors()[3])
    with pytest.raises(disco_client.HandleReleased):
        saved[4].load()
    after = attach_simulated(daemon.socket_dir, mode)
    check_all(save_all())
    assert clean(before)
    assert clean(after)


@pytest.mark.parametrize("mode", MODES)
def test_fork_with_copies_under_way(daemon: Daemon, mode: str) -> None:
    """A data loader's worker: it attaches for itself, and the parent's copies go on."""
    gpu = attach_simulated(daemon.socket_dir, mode)
    saved = save_all()
    saved[-2].load()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            waits = gpu.machine.waits
            saved.clear()
            attach_simulated(daemon.socket_dir, mode)
            check_all(save_all())
            disco_client.close()
            code = 0 if gpu.machine.waits == waits else 2
        finally:
            os._exit(code)
    check_all(saved)
    eventually(lambda: (status := os.waitpid(pid, os.WNOHANG))[0] and [status[1]], what="its end")
    assert clean(gpu)


@pytest.mark.parametrize("ending", ["pass", "disco_client.close()"])
def test_the_end_of_a_process(daemon: Daemon, ending: str) -> None:
    """The interpreter shuts down with copies under way each way: no crash, hang or message."""
    script = f"""
import torch, disco_client
from tests.helpers.simulated_attachment import attach_simulated
gpu = attach_simulated({str(daemon.socket_dir)!r}, "late")
from tests.integration.test_devices_life import save_all
saved = save_all(12)
loaded = [one.load() for one in saved[:4]]
x = torch.randn(64, 64, requires_grad=True)
output = disco_client.checkpoint(torch.sin, x * 1.0)
import atexit
atexit.register(lambda: print(gpu.machine.violations))
{ending}
"""
    process = nursery.start("-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.communicate(timeout=50) == ("[]\n", "")
        assert process.returncode == 0
    finally:
        process.close()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment(daemon: Daemon, seed: int) -> None:
    """Afterwards everything works, or every call says that it cannot. No copy goes astray."""
    gpu = attach_simulated(daemon.socket_dir, MODES[seed % 3], seed=seed)
    check_all(save_all())
    timers: list[threading.Timer] = []

    def interrupt(number: int, frame: Any) -> None:
        if not gpu.machine.lock._is_owned():  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        send(0.0002)  # in the simulation, which is not what is tested

    def send(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)))
        timers[-1].start()

    before = signal.signal(signal.SIGUSR1, interrupt)
    deadline = time.monotonic() + 1.0  # one that comes in a finalizer is printed, not raised
    try:
        send(random.Random(seed).random() * 0.1)
        while time.monotonic() < deadline:
            check_all(save_all())
    except (KeyboardInterrupt, disco_client.UsageError):
        pass
    finally:
        for timer in timers:  # a handler may add one meanwhile, which is then joined too
            timer.join(10)
        signal.signal(signal.SIGUSR1, before)
    try:
        check_all(save_all())
    except disco_client.UsageError:
        with pytest.raises(disco_client.UsageError, match="interrupted"):
            disco_client.stats()
        disco_client.close()
        assert clean(gpu)
        gpu = attach_simulated(daemon.socket_dir, MODES[seed % 3], seed=seed)
        check_all(save_all())
    assert clean(gpu)


def test_wait_for_save_waits_for_the_copy_too(daemon: Daemon) -> None:
    """Else it returns before there is anything to be written."""
    gpu = attach_simulated(daemon.socket_dir, "late")
    saved = save(torch.ones(SIZE))
    with pytest.raises(TimeoutError):
        saved.wait_saved(0)
    assert not gpu.machine.idle
    saved.wait_saved(10)
    assert gpu.machine.idle


@pytest.mark.parametrize("mode", MODES)
def test_prefetch_to_gpu(daemon: Daemon, mode: str) -> None:
    """A manager without it gets the same tensors, and nothing that it has not asked for."""
    gpu = attach_simulated(daemon.socket_dir, mode)
    for wanted in (True, False):
        manager = disco_client.DiskOffloadManager(prefetch_to_gpu=wanted)
        handles = [manager.save_tensor(tensor) for tensor in tensors()]
        before, hits = gpu.copies, disco_client.stats().device_hits
        for handle, tensor in reversed(list(zip(handles, tensors(), strict=True))):
            assert torch.equal(manager.load_tensor(handle), tensor)
        assert gpu.copies == before + len(handles)
        assert (disco_client.stats().device_hits > hits) == wanted
        manager.cleanup()
    assert clean(gpu)
