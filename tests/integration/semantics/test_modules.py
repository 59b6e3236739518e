"""State of modules: batch norms, caches, copies, pickles."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import disco_client
from disco_client.patches import torch as patch
from tests.helpers.forms import (
    ALL,
    PATCHED,
    RECOMPUTING,
    WIDTH,
    Apply,
    Form,
    compare,
    grads,
    layer,
    leaf,
)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_state_is_updated_as_often_as_by_torch(form: Form) -> None:
    """Batch norm statistics, counters and lists that forward changes: in both passes, no more."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh())
        counter, cache = torch.zeros(1), []

        def run(h: torch.Tensor) -> torch.Tensor:
            counter.add_(1)
            cache.append(None)
            return module(h)

        hidden = x * 1.0
        for _ in range(2):
            hidden = apply(run, hidden)
        hidden.sum().backward()
        return [*module.state_dict().values(), counter, torch.tensor(len(cache)), x.grad]

    compare(form, pattern)


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_nested_state_is_updated_as_often_as_by_torch(form: Form) -> None:
    """A call inside of a call: stored again inside, it would be recomputed less often."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), nn.BatchNorm1d(WIDTH)
        apply(lambda h: torch.sin(apply(module, torch.sin(h))), x * 1.0).sum().backward()
        return [*module.state_dict().values(), x.grad]

    if form.name in ("patched-reentrant", "disco"):
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            compare(form, pattern)
    else:
        compare(form, pattern)


class Partitioned(nn.Module):
    """A weight that is only there while the module runs, as ZeRO-3 does it for frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.whole = self.weight.detach().clone()
        self.register_forward_pre_hook(self.gather)
        self.register_forward_hook(self.partition)
        self.partition()

    def gather(self, *_: Any) -> None:
        self.weight.data = self.whole

    def partition(self, *_: Any) -> None:
        self.weight.data = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.weight.numel()
        return self.adapter(torch.sin(hidden)) + hidden * self.weight.sum()


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_partitioned_weights_are_gathered_for_the_recomputation(form: Form) -> None:
    """Calling forward instead of the module would see a weight of shape [0]."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), Partitioned()
        apply(module, x * 1.0).sum().backward()
        return [x.grad, module.adapter.weight.grad]

    compare(form, pattern)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_models_can_be_copied_and_saved(form: Form) -> None:
    """A lock or a handle on a module cannot be pickled; keys must not change."""
    module = layer()
    keys = list(module.state_dict())
    with form.around():
        output = form.apply(module, leaf() * 1.0)
        twin = copy.deepcopy(module)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        output.sum().backward()
        average = torch.optim.swa_utils.AveragedModel(module)
        average.update_parameters(module)
    assert list(module.state_dict()) == list(twin.state_dict()) == list(loaded.state_dict()) == keys
    form.apply(twin, leaf() * 1.0).sum().backward()
    assert all(g is not None for g in grads(twin))


def test_patch_is_idempotent_and_restores_the_very_originals() -> None:
    """Applied twice it must not count twice; removed, nothing of it may stay."""
    module = torch.utils.checkpoint
    before = dict(vars(module))
    patch.enable()
    patched = dict(vars(module))
    patch.enable()
    assert dict(vars(module)) == patched
    output = PATCHED.apply(layer(), leaf() * 1.0)
    assert disco_client.stats().saved_blobs == 1
    patch.disable()
    patch.disable()
    assert all(vars(module)[name] is value for name, value in before.items())
    assert set(vars(module)) == set(before)
    output.sum().backward()
    assert disco_client.stats().live_blobs == 0


def test_patch_under_another_patch_is_not_torn_out() -> None:
    """Undone in the wrong order, it would undo the other's as well: an error that says so."""
    module = torch.utils.checkpoint
    patch.enable()
    ours = module.CheckpointFunction
    module.CheckpointFunction = type("Other", (ours,), {})  # type: ignore[misc]
    with pytest.raises(disco_client.UsageError, match="undo that first"):
        patch.disable()
    module.CheckpointFunction = ours  # type: ignore[misc]
    patch.disable()


class Equal(nn.Module):
    """A module that is compared by what it is called, which it does not know from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.ones(64, WIDTH))
        self.name = "equal"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Unhashable(Equal):
    """A module that defines equality alone."""

    __hash__ = None  # type: ignore[assignment]  # what Python does to such a class


@pytest.mark.parametrize("kind", [Equal, Unhashable, nn.LazyBatchNorm1d])
def test_modules_can_be_built(kind: type[nn.Module]) -> None:
    """Every buffer of the process is looked at when it is registered: that must not fail."""
    one, two = kind(), kind()
    if isinstance(one, nn.LazyBatchNorm1d):
        one(torch.randn(2, WIDTH))
        return
    x = leaf()
    with disco_client.offload():
        loss = (x * one.large + x * two.large).sum()
    assert disco_client.stats().saved_blobs == 0  # both are known
    loss.backward()


def test_buffer_replaced_in_a_compiled_forward() -> None:
    """torch compiles what notes the buffers into the model, so it must be able to."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(64, WIDTH))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return hidden * self.count

    x, module = leaf(), Counts()
    torch.compile(module, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
