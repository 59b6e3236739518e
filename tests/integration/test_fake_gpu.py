"""Tensors through the pinned arena: a real daemon, and copies in the fake driver's threads.

The tensors are CPU tensors that are taken for a GPU's (``tests/helpers/fake_streams.py``).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import disco_client
from disco_client import DiskOffloadManager, pinning
from tests.helpers.daemon import Daemon
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_streams import EagerDriver, FakeGpu, use_for_cpu_tensors
from tests.helpers.forms import ALL, Form, compare, grads, layer, leaf

MIB = 1 << 20
OUT_OF_MEMORY = 2


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake driver, for this process and all that it starts."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 2 * MIB)
    directory = tmp_path / "cuda"
    directory.mkdir()
    fake = FakeCuda(directory)
    for name, value in fake.env().items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.fixture
def pinned(
    fake: FakeCuda, daemon: Daemon, attach_to: Callable[..., None]
) -> Callable[..., FakeGpu]:
    """``pinned(**settings)``: attach, and have tensors copied through a pinned arena."""

    def start(**settings: Any) -> FakeGpu:
        attach_to(daemon, arena="8MiB", min_bytes="4KiB", **settings)
        device = use_for_cpu_tensors(EagerDriver(str(fake.library)), over_ipc=False)
        assert isinstance(device, FakeGpu)
        return device

    return start


def stack(apply: Callable[..., Any]) -> list[torch.Tensor | None]:
    """Twelve layers, one after the other: more than the arena holds."""
    layers = [layer() for _ in range(12)]
    first = hidden = leaf(rows=8192)
    for one in layers:
        hidden = apply(one, hidden)
    hidden.square().sum().backward()
    return grads(first, *layers)


@pytest.mark.parametrize("delay", [0.0, 0.002])
@pytest.mark.parametrize("form", ALL, ids=str)
def test_training_is_equal(
    pinned: Callable[..., FakeGpu], fake: FakeCuda, form: Form, delay: float
) -> None:
    """With copies that end at once or late, through RAM and disk: else wrong gradients."""
    device = pinned()
    if delay:
        fake.delay("copy", delay)
    compare(form, stack)
    assert disco_client.stats().written_bytes > 0
    assert fake.registered_bytes()[os.getpid()] == device.pinning.pinned_bytes > 0
    disco_client.close()
    assert fake.registered_bytes()[os.getpid()] == 0
    assert fake.violations() == []


def test_an_arena_that_cannot_be_pinned(
    pinned: Callable[..., FakeGpu], fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the same gradients: else a memlock limit ends the training."""
    fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY, times=100, after=1)
    pinned()
    compare(ALL[0], stack)
    assert [record.name for record in caplog.records] == ["disco_client.pinning"]


def test_tensors_across_pieces(pinned: Callable[..., FakeGpu], fake: FakeCuda) -> None:
    """A tensor that lies in several pieces of the pinned arena is copied piece by piece."""
    pinned()
    manager = DiskOffloadManager()
    tensors = [torch.randn(900_000 + number) for number in range(6)]
    handles = [manager.save_tensor(tensor) for tensor in tensors]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)
