"""Accelerate: a plain loop by the torch patch, and FSDP2's offload switch by a patch of its own."""

import copy
import gc
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

import disco_client
from disco_client.patches import accelerate as accelerate_patch
from disco_client.patches import torch as torch_patch
from tests.helpers import nursery
from tests.helpers.daemon import Daemon
from tests.helpers.plain_script import LAYERS, STEPS, Model, train
from tests.helpers.scripts import by_the_page, equal, plain_gradients, run

MICRO_STEPS = 2


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    accelerate_patch.disable()
    torch_patch.disable()
    gc.collect()


@pytest.fixture
def attached(shared_daemon: Daemon, attach_to: Callable[..., None]) -> None:
    attach_to(shared_daemon, arena="8MiB")


def loop() -> list[torch.Tensor]:
    """Two steps of two micro-steps, by Accelerate: the weights at the end."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_STEPS)
    model = Model(recompute=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(STEPS * MICRO_STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(1024, 256)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def wrapped(offload: bool = True) -> nn.Module:
    """The model as Accelerate wraps it for FSDP2, before anything is sharded."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        activation_checkpointing_offload=offload,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
    )
    torch.manual_seed(0)
    model = Model(recompute=False)
    plugin.set_auto_wrap_policy(model)
    prepared: nn.Module = fsdp2_apply_ac(
        SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model
    )
    return prepared


def trained(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_plain_loop_with_gradient_accumulation(attached: None) -> None:
    """Else Accelerate's loop would train other weights, or not offload each micro-step's inputs."""
    plain = loop()
    disco_client.patch_torch()
    assert all(map(torch.equal, loop(), plain))
    assert disco_client.stats().saved_blobs == LAYERS * STEPS * MICRO_STEPS
    assert disco_client.stats().live_blobs == 0


def test_under_accelerate_launch(shared_daemon: Daemon, tmp_path: Path) -> None:
    """Else the runner could not take the script's place there; silenced, it must not be heard."""
    one = "--cpu --num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no"
    launch = ["-m", "accelerate.commands.accelerate_cli"]
    command = by_the_page("accelerate", tmp_path, *launch)
    command[3:3] = [*one.split(), "--num_cpu_threads_per_process=1"]
    environment = {"DISCOD_SOCKET_DIR": str(shared_daemon.socket_dir), "DISCOD_ARENA": "2MiB"}
    err = run(*command, "--out", tmp_path / "ours", DISCOD_SUMMARY="0", **environment)
    assert equal(plain_gradients(tmp_path / "plain"), tmp_path / "ours0")
    assert "discod" not in err


def test_two_fsdp2_ranks_by_the_page(shared_daemon: Daemon, tmp_path: Path) -> None:
    """Else the page's block would not offload under FSDP2, or train other weights."""
    command = ["-m", "tests.helpers.accelerate_rank", str(tmp_path)]
    environment = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "unused",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
        "DISCOD_SOCKET_DIR": str(shared_daemon.socket_dir),
        "DISCOD_ARENA": "2MiB",
    }
    ranks = [
        nursery.start(
            *(*command, "frameworks/accelerate.md"),
            env=os.environ | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.close()
    for rank in range(2):
        assert json.loads((tmp_path / f"report{rank}").read_text()) == {
            "equal": True,
            "same_names": True,
            "blobs": LAYERS * STEPS,
            "later_blobs": 0,
            "live_blobs": 0,
        }


@pytest.mark.parametrize(
    ("offload", "enable", "blobs"),
    [
        (True, [accelerate_patch.enable], LAYERS * STEPS),
        (True, [torch_patch.enable], LAYERS * STEPS),
        (True, [accelerate_patch.enable, torch_patch.enable], LAYERS * STEPS),
        (False, [torch_patch.enable], LAYERS * STEPS),
        (False, [accelerate_patch.enable], 0),
    ],
    ids=["switch", "switch-torch", "switch-both", "torch", "no-switch"],
)
def test_the_table_of_the_page(
    attached: None, offload: bool, enable: list[Callable[[], None]], blobs: int
) -> None:
    """Else inputs would stay in RAM, be stored twice, or the gradients be others."""
    plain = trained(wrapped(offload))
    assert disco_client.stats().saved_blobs == 0
    model = wrapped(offload)
    for switch in enable:
        switch()
    assert all(map(torch.equal, trained(model), plain))
    assert disco_client.stats().saved_blobs == blobs


def test_without_the_switch_nothing_moves(attached: None, caplog: pytest.LogCaptureFixture) -> None:
    """Else checkpointing alone would change its meaning; and one warning says why nothing moved."""
    accelerate_patch.enable()
    with caplog.at_level(logging.WARNING):
        trained(wrapped(offload=False))
    assert disco_client.stats().saved_blobs == 0
    (record,) = caplog.records
    assert "no checkpointed call reached discod" in record.getMessage()
    assert "activation_checkpointing_offload" in record.getMessage()


def test_small_tensors_are_the_reason_given(
    attached: None, shared_daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Else one would look for a missing switch where min_bytes is too high, or the step would fail.

    The parameters are larger than the activations here, and are not the reason.
    """
    disco_client.close()
    disco_client.connect(shared_daemon.socket_dir, arena="2MiB", min_bytes="16MiB")
    accelerate_patch.enable()
    layer = offload_wrapper(checkpoint_wrapper(nn.Linear(1024, 1024)))
    layer(torch.randn(1, 1024, requires_grad=True) * 1.0).sum().backward()
    disco_client.close()  # looking for the reason attaches to nothing
    torch.optim.SGD(layer.parameters()).step()
    (record,) = caplog.records
    assert "4.0 KiB, and min_bytes is 16.0 MiB" in record.getMessage()
    assert disco_client.stats().arena_bytes == 0


def test_the_model_stays_as_it_is(attached: None) -> None:
    """Else a checkpoint of the model would have other keys, or copying it would fail."""
    names = list(wrapped().state_dict())
    accelerate_patch.enable()
    model = wrapped()
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    assert all(map(torch.equal, trained(copied), trained(model)))


def test_enabled_twice_and_disabled() -> None:
    """Else a second enable would stack, or torch would stay changed after disable."""
    original = vars(OffloadWrapper)["forward"]
    accelerate_patch.enable()
    replaced = vars(OffloadWrapper)["forward"]
    accelerate_patch.enable()
    assert vars(OffloadWrapper)["forward"] is replaced is not original
    accelerate_patch.disable()
    accelerate_patch.disable()
    assert vars(OffloadWrapper)["forward"] is original
