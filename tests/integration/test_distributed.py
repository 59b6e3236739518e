"""What wrappers rely on in a recomputation, and a rank that fails among others.

The matrix of forms and wrappers is in ``test_compatibility``.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import disco_client
from tests.compatibility.forms import call_layer
from tests.compatibility.models import BATCH, LENGTH, WIDTH, Block, LowRankBlock
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.jobs import Rank
from tests.helpers.models import plain_checkpoint, reentrant_checkpoint

Attach = Callable[..., None]
Form = Callable[..., Any]

RECOMPUTING = {
    "torch, non-reentrant": plain_checkpoint,
    "checkpoint": disco_client.checkpoint,
    "torch, reentrant": reentrant_checkpoint,
    "Disco": disco_client.Disco.apply,
}
OURS = ["checkpoint", "Disco"]


@pytest.fixture
def hidden(attach_to: Attach, shared_daemon: Daemon) -> torch.Tensor:
    """Hidden states that need grad and are offloaded by this process's attachment."""
    attach_to(shared_daemon, arena="2MiB", min_bytes="1KiB")
    torch.manual_seed(0)
    return torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)


# A parameter used by two calls (DC-063)


@pytest.mark.parametrize(
    ("form", "times"),
    [("torch, non-reentrant", 1), ("checkpoint", 1), ("torch, reentrant", 2), ("Disco", 2)],
)
def test_hook_of_a_parameter_that_two_calls_share(
    hidden: torch.Tensor, form: str, times: int
) -> None:
    """Else optimizers that step in gradient hooks, and DDP, would see other gradients than torch's.

    The reentrant form has a backward for each call, so twice is what it claims.
    """
    layer = nn.Linear(WIDTH, WIDTH)
    seen: list[torch.Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    RECOMPUTING[form](layer, RECOMPUTING[form](layer, hidden)).sum().backward()
    assert len(seen) == times
    assert torch.equal(seen[-1], layer.weight.grad)
    assert (disco_client.stats().saved_bytes > 0) == (form in OURS)


# Layers sharded by FSDP2


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    gc.collect()  # what FSDP2 holds of the group is in cycles
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "called",
    [
        lambda block: block,
        lambda block: block.__call__,
        lambda block: functools.partial(functools.partial(block.__call__)),
    ],
    ids=["module", "method", "partial"],
)
def test_second_recomputation_of_a_sharded_layer_is_refused(
    hidden: torch.Tensor, called: Callable[[nn.Module], Form]
) -> None:
    """Else FSDP2 would skip the reduction of the second call's gradients, and nobody would know."""
    block = fully_shard(Block(), mesh=init_device_mesh("cpu", (1,)))
    run = called(block)
    for _ in range(2):  # once in each backward is no fault
        disco_client.Disco.apply(run, hidden).sum().backward()
    first = disco_client.Disco.apply(run, hidden)
    second = disco_client.Disco.apply(run, hidden)
    with pytest.raises(disco_client.UnsupportedCall, match=r"FSDPBlock.*disco_client\.checkpoint"):
        (first + second).sum().backward()


@pytest.mark.usefixtures("alone")
def test_sharded_layers_of_one_model_are_told_apart(hidden: torch.Tensor) -> None:
    """Else ``Disco`` would refuse every model with more than one layer."""
    mesh = init_device_mesh("cpu", (1,))
    blocks = [fully_shard(Block(), mesh=mesh), Block(), fully_shard(Block(), mesh=mesh)]
    last = hidden
    for block in blocks:
        last = disco_client.Disco.apply(block, last)
    last.sum().backward()
    assert all(p.grad is not None for block in blocks for p in block.parameters())


class Halves(Block):
    """A layer that recomputes its two halves on its own, by methods."""

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(hidden))

    def second(self, wide: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(wide))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = disco_client.Disco.apply(self.first, hidden)
        return hidden + disco_client.Disco.apply(self.second, wide)


@pytest.mark.usefixtures("alone")
def test_methods_that_a_sharded_layer_recomputes_are_no_second_call_of_it(
    hidden: torch.Tensor,
) -> None:
    """Else a layer that checkpoints its parts would be refused, though FSDP2 gets it right."""
    plain, block = Block(dropout=0), Halves(dropout=0)
    block.load_state_dict(plain.state_dict())
    plain(hidden).square().sum().backward()
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    block(hidden).square().sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), block.parameters(), strict=True):
        assert torch.equal(found.grad.to_local(), expected.grad), name


# Frozen weights that are there only inside of a module's call (DC-067)


class Partitioner:
    """ZeRO-3 in small: a module's frozen parameters are empty except while hooks gather them."""

    def __init__(self, module: nn.Module) -> None:
        self.gathered = 0
        self._full = {p: p.data for p in module.parameters() if not p.requires_grad}
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda *_: self.free())
        module.register_full_backward_pre_hook(lambda *_: self.gather())
        module.register_full_backward_hook(lambda *_: self.free())
        self.free()

    def gather(self) -> None:
        """Bring the weights."""
        self.gathered += 1
        for parameter, full in self._full.items():
            parameter.data = full

    def free(self) -> None:
        """Take them away again."""
        for parameter in self._full:
            parameter.data = torch.empty(0)

    def is_free(self) -> bool:
        """Whether nothing is gathered."""
        return all(parameter.numel() == 0 for parameter in self._full)


def partitioned_step(form: Form, hidden: torch.Tensor, *, partition: bool) -> dict[str, Any]:
    """One step of two low-rank layers: their gradients, and that of their input."""
    torch.manual_seed(1)
    layers = [LowRankBlock(), LowRankBlock()]
    partitioners = [Partitioner(layer) for layer in layers] if partition else []
    entry = hidden.detach().requires_grad_()
    last = entry * 1
    for layer in layers:
        last = form(layer, last)
    last.square().sum().backward()
    for partitioner in partitioners:
        assert partitioner.is_free()
        assert partitioner.gathered == 3  # forward, recomputation, backward
    trained = [p.grad for layer in layers for p in layer.parameters() if p.requires_grad]
    return {"input": entry.grad, **dict(enumerate(trained))}


@pytest.mark.parametrize("form", RECOMPUTING)
def test_recomputation_gathers_what_hooks_took_away(hidden: torch.Tensor, form: str) -> None:
    """Else the recomputation of a frozen layer under ZeRO-3 would see weights of shape [0]."""
    expected = partitioned_step(call_layer, hidden, partition=False)
    found = partitioned_step(RECOMPUTING[form], hidden, partition=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (disco_client.stats().saved_bytes > 0) == (form in OURS)
    assert disco_client.stats().live_blobs == 0


# One rank without room (DC-064)


@pytest.mark.parametrize("form", ["checkpoint", "disco"])
def test_rank_without_room_ends_alone_and_at_once(
    daemon: Daemon, start_daemon: Callable[..., Daemon], short_dir: Path, tmp_path: Path, form: str
) -> None:
    """Else a full disk would show as a collective that times out, on the ranks that are well."""
    (tmp_path / "small").mkdir()
    small = start_daemon("--disk", "2MiB", scratch=tmp_path / "small", socket_dir=short_dir)
    settings = {
        "forms": [form],
        "model": {"layers": 8, "width": 128, "length": 128},  # 8 MiB of hidden states
        "train": {"steps": 1, "batch": 16, "length": 128},
        "store": str(tmp_path / "store"),
    }
    ranks: list[Rank] = []
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        for rank, own in enumerate((daemon, small)):
            connect = {"socket_dir": str(own.socket_dir), "arena": "2MiB", "min_bytes": "256KiB"}
            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            ranks.append(
                Rank(
                    settings | {"connect": connect}, stderr=stderr if rank else None, **environment
                )
            )
    try:
        well, full = ranks
        well.wait_ready()
        assert full.process.wait(10) == 1
        text = errors.read_text()
        assert "ScratchFull" in text
        for part in (str(tmp_path / "small"), "2.0 MiB", "--disk"):
            assert part in text
        well.process.terminate()
        assert well.process.wait(10) != 0
        for own in (daemon, small):
            eventually(lambda own=own: own.status()["clients"] == [], what="the ranks' end")
    finally:
        for rank in ranks:
            rank.kill()
