"""What CUDA has beside streams, with torch's own part replaced: there is no GPU here."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from disco_client import cuda
from disco_client.arena import Arena
from disco_client.cuda import Cuda, cuda_over_ipc
from disco_client.devices.known import Devices
from disco_client.errors import UnsupportedCall
from disco_client.ipc import Ipc
from disco_client.session import Session
from discod.cuda_driver import Driver
from tests.helpers.fake_cuda import FakeCuda

MIB = 1 << 20
GPU = torch.device("cuda", 0)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena of 4 MiB."""
    arena = Arena(4 * MIB)
    yield arena
    arena.close()


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch with one GPU; what a test sets on it is what torch says."""
    gpu = SimpleNamespace(capturing=False, retries=0, total=24 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": gpu.retries}
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=gpu.total),
    )
    return gpu


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake driver, for this process."""
    fake = FakeCuda(tmp_path, devices=2)
    for name, value in fake.env().items():
        monkeypatch.setenv(name, value)
    return fake


def test_a_capture_is_refused(arena: Arena, fake: FakeCuda, one_gpu: SimpleNamespace) -> None:
    """Else a replayed graph copies from and to what belongs to others by then."""
    device = Cuda(arena, GPU)
    device.check(GPU)
    assert device.reachable()
    one_gpu.capturing = True
    with pytest.raises(UnsupportedCall, match="CUDA graph is captured"):
        device.check(GPU)
    assert not device.reachable()


def test_nothing_is_asked_in_a_capture(
    arena: Arena, fake: FakeCuda, one_gpu: SimpleNamespace
) -> None:
    """A handle that is dropped there looks at copies, which ends the capture with an error."""
    devices = Devices(arena)
    assert isinstance(devices.of(GPU), Cuda)
    assert devices.reachable()
    one_gpu.capturing = True
    assert not devices.reachable()


def test_bounds_and_shortages_are_the_gpus(
    arena: Arena, fake: FakeCuda, one_gpu: SimpleNamespace
) -> None:
    """Else copies take of a small GPU what they are to free, or nobody notices that it is full."""
    devices = Devices(arena)
    assert devices.limit_bytes(GPU) == 768 * MIB
    assert devices.limit_bytes(torch.device("cuda", 1)) == 768 * MIB
    assert Devices(arena, staging_bytes=5).limit_bytes(GPU) == 5
    one_gpu.total = 139 << 30
    assert Devices(arena).limit_bytes(GPU) == 1 << 30
    one_gpu.retries = 3
    assert devices.shortages(GPU) == 3


def test_an_allocator_without_counts(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a pluggable allocator, as RMM's, no save would work: torch raises for its counts."""

    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.cuda, "memory_stats", refuse)
    assert Devices(arena).shortages(GPU) == 0


def test_a_device_becomes_known_while_others_are_asked(arena: Arena) -> None:
    """By another thread's first save: else a section ends half-way, and the session is torn."""
    devices = Devices(
        arena, makers={"cpu": lambda unit: cast(Any, asked), "meta": lambda unit: None}
    )
    asked = SimpleNamespace(reachable=lambda: devices.of(torch.device("meta")) is None)
    assert devices.of(torch.device("cpu")) is asked
    assert devices.reachable()


def test_the_arena_is_pinned_where_copies_go(arena: Arena, fake: FakeCuda) -> None:
    """Else copies are from pageable memory, and hold up the training."""
    device = Cuda(arena, GPU)
    arena.back(4 * MIB)
    assert list(device._parts(0, MIB)) == [(0, MIB)]
    assert sum(fake.registered_bytes().values()) == 4 * MIB
    device.close()
    assert sum(fake.registered_bytes().values()) == 0


@pytest.mark.parametrize(
    ("named", "used"), [(GPU, 0), (torch.device("cuda", 1), 1), (torch.device("cuda"), 1)]
)
def test_no_other_gpu_gets_a_context(
    arena: Arena, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, named: torch.device, used: int
) -> None:
    """Else every rank of a job takes some 500 MB of the first GPU's memory."""
    contexts: list[int] = []
    on = Driver.on

    def counted(driver: Driver, ordinal: int) -> AbstractContextManager[None]:
        contexts.append(ordinal)
        return on(driver, ordinal)

    monkeypatch.setattr(Driver, "on", counted)
    device = Devices(arena).of(named)
    assert isinstance(device, Cuda)
    arena.back(4 * MIB)
    list(device._parts(0, MIB))
    device.close()
    assert set(contexts) == {used}


@pytest.mark.parametrize("over_ipc", [False, True])
def test_without_the_drivers_library(
    arena: Arena,
    over_ipc: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning, and copies from pageable memory: else such a machine cannot train."""
    monkeypatch.setenv("DISCOD_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    with caplog.at_level(logging.WARNING):
        if over_ipc:
            device: Any = cuda_over_ipc(cast(Session, None), arena, GPU, lambda device: MIB)
        else:
            device = Cuda(arena, GPU)
    assert type(device) is Cuda
    assert list(device._parts(0, MIB)) == [(0, MIB)]
    record, *others = caplog.records
    assert ["cuda-ipc" in other.getMessage() for other in others] == [True] * over_ipc
    assert "DISCOD_CUDA_LIBRARY" in record.getMessage()
    assert "/nowhere/libcuda.so.1" in record.getMessage()


def test_over_ipc_with_a_driver(arena: Arena, fake: FakeCuda) -> None:
    """Else transport="cuda-ipc" would do nothing."""
    device = cuda_over_ipc(cast(Session, None), arena, GPU, lambda device: MIB)
    assert isinstance(device, Ipc)
    assert device.staging_bytes(GPU) == cuda.staging_bytes(GPU)
