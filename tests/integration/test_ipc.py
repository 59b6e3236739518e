"""Tensors through device rings: a real daemon with its GPU process, over the fake driver.

The tensors are CPU tensors that are taken for a GPU's (``tests/helpers/fake_streams.py``).
"""

import gc
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import disco_client
from disco_client import DiskOffloadManager, connection
from disco_client.devices.interface import Arrival
from disco_client.devices.streamed import StreamTicket
from disco_client.ipc import Ipc
from discod.gpu_host import MOST_DEATHS
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_streams import EagerDriver, use_for_cpu_tensors
from tests.helpers.forms import ALL, Form, compare, grads, layer, leaf

MIB = 1 << 20
OUT_OF_MEMORY = 2
INVALID_HANDLE = 400

pytestmark = pytest.mark.usefixtures("no_violations")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake driver, for this process and all that it starts."""
    directory = tmp_path / "cuda"
    directory.mkdir()
    fake = FakeCuda(directory)
    for name, value in fake.env().items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.fixture
def no_violations(fake: FakeCuda) -> Iterator[None]:
    """Nothing that a real driver would crash on or leak, by the end of the test."""
    yield
    disco_client.close()
    fake.heal()
    assert fake.violations() == []
    assert fake.allocated_bytes()[os.getpid()] == 0


@pytest.fixture
def over_ipc(fake: FakeCuda, daemon: Daemon, attach_to: Callable[..., None]) -> Callable[..., Ipc]:
    """``over_ipc(**settings)``: attach, and have tensors copied through the daemon's process."""

    def start(arena: str = "8MiB", ring_bytes: int = 2 * MIB, **settings: Any) -> Ipc:
        attach_to(daemon, arena=arena, min_bytes="4KiB", **settings)
        driver = EagerDriver(str(fake.library))
        device = use_for_cpu_tensors(driver, over_ipc=True, ring_bytes=ring_bytes)
        assert isinstance(device, Ipc)
        return device

    return start


def pid_of_the_process(daemon: Daemon) -> int:
    """The daemon's one GPU process."""
    (gpu,) = daemon.status()["gpus"]
    return int(gpu["pid"])


def await_quiet() -> None:
    """Until no copy is under way."""
    session = connection.current().session

    def quiet() -> bool:
        session.stats()
        return not session._staging.pending

    eventually(quiet, what="the end of the copies")


def random_tensor(seed: random.Random) -> torch.Tensor:
    """A tensor of any size up to three rings, contiguous or with gaps."""
    items = seed.choice([1, 1000, 40_000, 200_000, 900_000])
    tensor = torch.randn(items + seed.randrange(64))
    match seed.randrange(4):
        case 0:
            return tensor[3:]
        case 1:
            return tensor[: items // 2 * 2].view(-1, 2)[:, 1]
        case 2:
            return tensor.to(torch.bfloat16)
        case _:
            return tensor


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_back_is_what_was_saved(over_ipc: Callable[..., Ipc], seed: int) -> None:
    """Through ring, arena and disk, in any order, larger than the ring: else wrong gradients."""
    over_ipc()
    choose = random.Random(seed)
    manager = DiskOffloadManager(prefetch_size=choose.choice([0, 3]))
    saved: list[tuple[Any, torch.Tensor]] = []
    for _ in range(60):
        if saved and choose.random() < 0.45:
            handle, expected = saved.pop(choose.randrange(len(saved)))
            assert torch.equal(manager.load_tensor(handle), expected)
        else:
            tensor = random_tensor(choose)
            saved.append((manager.save_tensor(tensor), tensor.clone()))
            tensor.zero_()
    for handle, expected in reversed(saved):
        assert torch.equal(manager.load_tensor(handle), expected)
    assert disco_client.stats().written_bytes > 0


def stack(apply: Callable[..., Any]) -> list[torch.Tensor | None]:
    """Six layers, one after the other."""
    layers = [layer() for _ in range(6)]
    first = hidden = leaf(rows=512)
    for one in layers:
        hidden = apply(one, hidden)
    hidden.square().sum().backward()
    return grads(first, *layers)


@pytest.mark.parametrize("form", ALL, ids=str)
@pytest.mark.parametrize("keep", [0, 1])
def test_training_is_equal(over_ipc: Callable[..., Ipc], form: Form, keep: int) -> None:
    """In every form, with the newest tensor on the GPU or not: else results change with it."""
    over_ipc(keep_on_device=keep)
    compare(form, stack)


def test_a_change_after_the_save_spoils_nothing(
    over_ipc: Callable[..., Ipc], fake: FakeCuda
) -> None:
    """The ring has the value by then; else this would raise, or the changed value come back."""
    over_ipc(keep_on_device=0)
    fake.delay("copy", 0.01)
    source = torch.randn(50_000, requires_grad=True)
    hidden = source * 2
    expected = hidden.detach().clone()
    with disco_client.offload():
        squared = hidden.square()
    hidden.detach().zero_()
    squared.sum().backward()
    assert torch.equal(source.grad, 4 * expected)  # type: ignore[arg-type]


def test_the_source_is_free_once_it_is_in_the_ring(
    over_ipc: Callable[..., Ipc], fake: FakeCuda
) -> None:
    """Else the GPU's memory is held twice until the copy has landed."""
    over_ipc(keep_on_device=1)
    fake.delay("copy", 0.05)
    tensors = [torch.randn(50_000, requires_grad=True) * number for number in range(1, 4)]
    with disco_client.offload():
        sums = [tensor.square().sum() for tensor in tensors]
    freed = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    assert connection.current().session._staging.pending
    assert [storage.expired() for storage in freed] == [True, True, False]
    sum(sums).backward()  # type: ignore[union-attr]


def test_the_allocator_knows_the_stream_of_a_source_that_is_let_go(
    over_ipc: Callable[..., Ipc], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that was allocated on another stream is overwritten before it is in the ring."""
    over_ipc(keep_on_device=0)
    told: list[int] = []
    monkeypatch.setattr(StreamTicket, "_lend", lambda _, flat, stream: told.append(flat.nbytes))
    tensor = torch.randn(50_000, requires_grad=True) * 2
    with disco_client.offload():
        total = tensor.square().sum()
    assert told == [200_000]
    total.backward()


def test_the_process_is_killed_in_the_middle_of_copies(
    over_ipc: Callable[..., Ipc], daemon: Daemon, fake: FakeCuda
) -> None:
    """The next one does them again: else a crash of the GPU process costs the training run."""
    over_ipc()
    manager = DiskOffloadManager()
    saved = []
    fake.delay("copy", 0.02)
    for number in range(12):
        tensor = torch.full((100_000,), float(number))
        saved.append((manager.save_tensor(tensor), tensor))
        if number % 4 == 1:
            os.kill(pid_of_the_process(daemon), signal.SIGKILL)
    for number, (handle, tensor) in enumerate(reversed(saved)):
        if number == 5:
            os.kill(pid_of_the_process(daemon), signal.SIGKILL)
        assert torch.equal(manager.load_tensor(handle), tensor)


def test_the_daemon_is_killed_in_the_middle_of_copies(
    over_ipc: Callable[..., Ipc],
    daemon: Daemon,
    start_daemon: Callable[..., Daemon],
    fake: FakeCuda,
) -> None:
    """The next daemon is told of the ring before of the copies: else they fail, or are lost."""
    over_ipc()
    manager = DiskOffloadManager()
    fake.delay("copy", 0.02)
    saved = []
    for number in range(6):
        tensor = torch.full((100_000,), float(number))
        saved.append((manager.save_tensor(tensor), tensor))
    daemon.kill()
    start_daemon()
    for handle, tensor in reversed(saved):
        assert torch.equal(manager.load_tensor(handle), tensor)
    assert pid_of_the_process(daemon)


def test_no_daemon_can_open_the_ring(
    over_ipc: Callable[..., Ipc], fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and copies by this process: else a container without IPC cannot train at all."""
    over_ipc()
    fake.fail("cuIpcOpenMemHandle_v2", INVALID_HANDLE, times=100)
    with caplog.at_level(logging.WARNING, logger="disco_client"):
        compare(ALL[0], stack)
    (record,) = caplog.records
    assert "the daemon cannot copy" in record.getMessage()
    assert "CUDA_ERROR_INVALID_HANDLE" in record.getMessage()
    assert fake.allocated_bytes()[os.getpid()] == 0


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcGetEventHandle"])
def test_memory_that_cannot_be_shared(
    over_ipc: Callable[..., Ipc], fake: FakeCuda, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """As where the GPU has no memory left for a ring: one warning, and copies by this process."""
    over_ipc()
    fake.fail(call, OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING, logger="disco_client"):
        compare(ALL[0], stack)
    (record,) = caplog.records
    assert "CUDA_ERROR_OUT_OF_MEMORY" in record.getMessage()
    assert fake.allocated_bytes()[os.getpid()] == 0


@pytest.mark.parametrize("direction", ["save", "load"])
def test_copies_that_the_daemon_gives_up_are_done_here(
    over_ipc: Callable[..., Ipc],
    fake: FakeCuda,
    caplog: pytest.LogCaptureFixture,
    daemon: Daemon,
    direction: str,
) -> None:
    """From what is in the ring, or in the arena: else what was under way at the end is lost."""
    over_ipc(keep_on_device=0)
    manager = DiskOffloadManager(prefetch_size=0, prefetch_to_gpu=False)
    tensor = torch.randn(300_000)
    handles = [manager.save_tensor(tensor)]
    manager.wait_for_save(handles[0])
    fake.delay("copy", 0.3)
    loaded: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: loaded.append(manager.load_tensor(handles[-1])))
    with caplog.at_level(logging.WARNING, logger="disco_client"):
        if direction == "save":
            handles.append(manager.save_tensor(tensor * 2))
        thread.start()
        try:
            kill_until_the_daemon_gives_up(daemon)
        finally:
            fake.heal()
            thread.join(30)
    assert not thread.is_alive()
    assert torch.equal(loaded[0], tensor if direction == "load" else tensor * 2)
    assert len(caplog.records) == 1
    handles.clear()
    compare(ALL[0], stack)


def kill_until_the_daemon_gives_up(daemon: Daemon) -> None:
    """Kill each GPU process before it has copied anything."""
    for _ in range(MOST_DEATHS):
        (gpu,) = daemon.status()["gpus"]
        os.kill(gpu["pid"], signal.SIGKILL)
        eventually(
            lambda dead=gpu["pid"]: dead not in [gpu["pid"] for gpu in daemon.status()["gpus"]],
            what="its end",
        )


def test_the_ring_is_freed_when_nobody_has_it_open(
    over_ipc: Callable[..., Ipc], daemon: Daemon, fake: FakeCuda
) -> None:
    """Freeing what another process has open is undefined; not freeing it is a leak."""
    over_ipc()
    handle = DiskOffloadManager().save_tensor(torch.randn(50_000))
    process = pid_of_the_process(daemon)
    assert fake.open_handles()[process] == 1
    assert fake.allocated_bytes()[os.getpid()] == 2 * MIB
    fake.delay("cuIpcCloseMemHandle", 0.05)
    disco_client.close()
    assert fake.open_handles()[process] == 0
    assert fake.allocated_bytes()[os.getpid()] == 0
    del handle


def test_detaching_from_a_daemon_that_is_stopped(
    over_ipc: Callable[..., Ipc],
    daemon: Daemon,
    fake: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The memory stays, with a warning: else close() hangs, or frees what another process uses."""
    monkeypatch.setattr("disco_client.ipc.DETACH_SECONDS", 0.2)
    device = over_ipc()
    handle = DiskOffloadManager().save_tensor(torch.randn(50_000))
    ring = next(iter(device._lanes.values())).ring
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with caplog.at_level(logging.WARNING, logger="disco_client"):
            disco_client.close()
        assert "stays until this process ends" in caplog.text
        assert fake.allocated_bytes()[os.getpid()] == 2 * MIB
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    process = pid_of_the_process(daemon)
    eventually(lambda: not fake.open_handles()[process], what="the end of the client")
    ring.free()
    del handle


def test_graphs_that_are_dropped_free_the_ring(
    over_ipc: Callable[..., Ipc], fake: FakeCuda
) -> None:
    """With copies under way in both directions: else the ring fills up, and saves hang."""
    device = over_ipc(keep_on_device=0)
    fake.delay("copy", 0.002)
    manager = DiskOffloadManager()
    for _ in range(10):
        handles = [manager.save_tensor(torch.randn(60_000)) for _ in range(6)]
        manager.load_tensor(handles[-1])
        del handles
        gc.collect()
    await_quiet()
    ring = next(iter(device._lanes.values())).ring
    assert ring.take(ring.size_bytes) == 0


@pytest.mark.parametrize("direction", ["save", "load"])
def test_an_interrupt_while_a_large_tensor_waits_for_the_ring(
    over_ipc: Callable[..., Ipc],
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    """Ctrl-C between two pieces: the pieces under way end before their slot is another blob's."""
    device = over_ipc(keep_on_device=0)
    manager = DiskOffloadManager(prefetch_size=0, prefetch_to_gpu=False)
    large = torch.randn(1_500_000)
    handle = manager.save_tensor(large)
    manager.wait_for_save(handle)
    process = pid_of_the_process(daemon)
    link = connection.current().session.link
    wait = link.wait
    waits = 0

    def interrupted(timeout: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            os.kill(process, signal.SIGCONT)
            raise KeyboardInterrupt
        wait(timeout)

    monkeypatch.setattr(link, "wait", interrupted)
    os.kill(process, signal.SIGSTOP)
    call = partial(manager.save_tensor, large * 2)
    if direction == "load":
        call = partial(manager.load_tensor, handle)
    with pytest.raises(KeyboardInterrupt):
        call()
    others = [torch.full((200_000,), float(number)) for number in range(5)]
    handles = [manager.save_tensor(other) for other in others]
    for other, its in zip(others, handles, strict=True):
        assert torch.equal(manager.load_tensor(its), other)
    assert torch.equal(manager.load_tensor(handle), large)
    del handles, its
    handle = manager.save_tensor(large)
    await_quiet()
    ring = next(iter(device._lanes.values())).ring
    assert ring.take(ring.size_bytes) == 0


def test_an_interrupt_while_the_ring_is_opened(
    over_ipc: Callable[..., Ipc],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next save goes on with that ring: else its memory is lost, and the transport as well."""
    over_ipc()
    manager = DiskOffloadManager()
    link = connection.current().session.link
    tensor = torch.randn(50_000)
    with monkeypatch.context() as patched:

        def interrupted(timeout: float) -> None:
            raise KeyboardInterrupt

        patched.setattr(link, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.save_tensor(tensor)
    handle = manager.save_tensor(tensor)
    assert torch.equal(manager.load_tensor(handle), tensor)
    assert not caplog.records


def test_detaching_after_an_interrupt_while_the_ring_was_opened(
    over_ipc: Callable[..., Ipc], monkeypatch: pytest.MonkeyPatch, fake: FakeCuda
) -> None:
    """The ring is freed, although nothing was ever copied through it."""
    over_ipc()
    manager = DiskOffloadManager()
    with monkeypatch.context() as patched:

        def interrupted(timeout: float) -> None:
            raise KeyboardInterrupt

        patched.setattr(connection.current().session.link, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.save_tensor(torch.randn(50_000))
    disco_client.close()
    assert fake.allocated_bytes()[os.getpid()] == 0


def test_loads_ahead_go_through_the_ring(over_ipc: Callable[..., Ipc]) -> None:
    """Else every load waits for its copy, one after the other."""
    device = over_ipc(keep_on_device=0, staging="1MiB")
    brought: list[Arrival] = []
    stage_in = device.stage_in

    def count(*args: Any) -> Arrival:
        brought.append(stage_in(*args))
        return brought[-1]

    device.stage_in = count  # type: ignore[method-assign]
    manager = DiskOffloadManager()
    tensors = [torch.randn(40_000) for _ in range(6)]
    handles = [manager.save_tensor(tensor) for tensor in tensors]
    for handle in handles:
        manager.wait_for_save(handle)
    assert torch.equal(manager.load_tensor(handles[-1]), tensors[-1])
    assert len(brought) > 1
    for handle, tensor in zip(reversed(handles), reversed(tensors), strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)
    assert disco_client.stats().device_hits >= 3


def test_memory_runs_short_after_a_load_found_its_source(
    over_ipc: Callable[..., Ipc], fake: FakeCuda
) -> None:
    """The first load of a backward, whose save is still under way: else it gets no bytes at all."""
    device = over_ipc(keep_on_device=1)
    source = torch.randn(50_000, requires_grad=True)
    hidden = [source * number for number in range(1, 5)]
    with disco_client.offload():
        sums = [one.square().sum() for one in hidden[:-1]]
        await_quiet()
        fake.delay("copy", 0.2)
        sums.append(hidden[-1].square().sum())
    del hidden
    stage_in, calls = device.stage_in, 0

    def short(*args: Any) -> Arrival:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("no memory for a copy ahead")
        return stage_in(*args)

    device.stage_in = short  # type: ignore[method-assign]
    sums[-1].backward(retain_graph=True)
    assert calls == 1
    assert torch.equal(source.grad, 32 * source.detach())  # type: ignore[arg-type]
    sum(sums[:-1]).backward()


@pytest.mark.parametrize("value", ["ipc", "cuda_ipc", ""])
def test_transports_are_checked(daemon: Daemon, value: str) -> None:
    """Else a misspelt transport would silently be another one."""
    with pytest.raises(ValueError, match=r"transport: .* is none of auto, shared-memory, cuda-ipc"):
        disco_client.connect(daemon.socket_dir, transport=value)
