"""``checkpoint()``: torch's non-reentrant checkpoint in every form it is called, bit for bit."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import disco_client

Attach = Callable[..., None]
WIDTH = 256
ROWS = 1024
"""A hidden state is 1 MiB."""


@pytest.fixture(autouse=True)
def attached(attach: Attach) -> None:
    attach(arena="8MiB")


def compare(build: Callable[[Callable[..., Any]], list[torch.Tensor]]) -> None:
    """``build(checkpoint)`` runs a step and returns gradients; both forms must give equal ones."""
    torch.manual_seed(1)
    expected = build(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    got = build(disco_client.checkpoint)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert disco_client.stats().live_blobs == 0


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3))


def source() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def test_keyword_arguments_are_offloaded_too() -> None:
    """hidden_states= by keyword, as many models call their layers, must not stay in memory."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        leaf, module = source(), layer()

        def run(scale: float, *, hidden_states: torch.Tensor) -> torch.Tensor:
            return module(hidden_states) * scale

        checkpoint(run, 2.0, hidden_states=leaf * 1.0).sum().backward()
        return [leaf.grad]

    compare(build)
    assert disco_client.stats().saved_bytes == ROWS * WIDTH * 4


def test_shared_inputs_are_stored_once() -> None:
    """Position embeddings that all layers get are one blob; a changed version is another."""
    shared, module = source() * 1.0, layer()
    outputs = [disco_client.checkpoint(lambda h: module(h).sum(), shared) for _ in range(4)]
    assert disco_client.stats().live_blobs == 1
    with torch.no_grad():
        shared.add_(1)
    outputs.append(disco_client.checkpoint(lambda h: module(h).sum(), shared))
    outputs.append(disco_client.checkpoint(lambda h: module(h).sum(), shared[1:]))
    assert disco_client.stats().live_blobs == 2  # shared[1:] is under min_bytes
    del outputs
    assert disco_client.stats().live_blobs == 0


def test_a_new_storage_at_an_old_address_is_another_blob() -> None:
    """Sharing by a raw address would hand one layer's bytes to another."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        outputs, leaf = [], source()
        for i in range(20):
            hidden = leaf * float(i)
            outputs.append(checkpoint(torch.sin, hidden))
            del hidden
        torch.stack([output.sum() for output in outputs]).sum().backward()
        return [leaf.grad]

    compare(build)


def test_other_arguments_pass_through_unchanged() -> None:
    """None, numbers, strings, masks and integer tensors arrive as they are, in both passes."""
    seen: list[tuple[Any, ...]] = []

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        leaf, factor = source(), torch.ones(3, requires_grad=True)
        mask, index = torch.rand(ROWS, 1) > 0.5, torch.arange(ROWS)

        def run(h: torch.Tensor, *args: Any) -> torch.Tensor:
            seen.append(tuple(type(a) for a in args))
            nothing, number, m, text, i, f = args
            assert (nothing, number, text) == (None, 3, "s")
            return torch.sin(h[i] * m * number) * f.sum()

        checkpoint(run, leaf * 1.0, None, 3, mask, "s", index, factor * 1.0).sum().backward()
        return [leaf.grad, factor.grad]

    compare(build)
    assert len(set(seen)) == 1


def test_outputs_keep_their_container() -> None:
    """Tensors, tuples, lists, dicts and None come back as the function returned them."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        leaf = source()
        out = checkpoint(lambda h: {"a": torch.sin(h), "b": [h.detach() * 2, None, 7]}, leaf * 1.0)
        assert out["b"][1:] == [None, 7]
        assert not out["b"][0].requires_grad
        out["a"].sum().backward()
        return [leaf.grad]

    compare(build)


def test_frozen_input_with_trainable_layer() -> None:
    """LoRA behind a frozen embedding: the adapter must still get its gradient."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        module = layer()
        checkpoint(module, source().detach()).sum().backward()
        return [p.grad for p in module.parameters()]

    compare(build)


def test_double_backward_and_autograd_grad() -> None:
    """Second-order gradients are those of plain checkpointing."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        leaf = source()
        output = checkpoint(torch.sin, checkpoint(torch.cos, leaf * 1.0))
        (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
        (grad**2).sum().backward()
        return [grad.detach(), leaf.grad]

    compare(build)


def test_nested_and_out_of_order() -> None:
    """Checkpoints inside checkpoints, and losses that run backward in another order."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        module, inner = layer(), layer()
        leaves = [source() for _ in range(3)]
        losses = [
            checkpoint(lambda h: checkpoint(inner, module(h)), leaf * 1.0).sum() for leaf in leaves
        ]
        for i in (0, 2, 1):
            losses[i].backward()
        return [leaf.grad for leaf in leaves] + [p.grad for p in module.parameters()]

    compare(build)


def test_several_forwards_before_one_backward() -> None:
    """Micro-batches and preference pairs: their blobs must not be mixed."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        module = layer()
        leaves = [source() for _ in range(4)]
        torch.stack([checkpoint(module, leaf * 1.0).sum() for leaf in leaves]).sum().backward()
        return [leaf.grad for leaf in leaves]

    compare(build)


def test_input_changed_after_the_call_keeps_its_value() -> None:
    """The recomputation sees the value at the call, not bytes that came later."""
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    hidden = leaf * 1.0
    output = disco_client.checkpoint(torch.sin, hidden)
    expected = torch.cos(leaf.detach())
    with torch.no_grad():
        hidden.fill_(float("nan"))
    output.sum().backward()
    assert torch.equal(leaf.grad, expected)


def test_input_changed_inside_is_refused_at_once() -> None:
    """torch refuses it in backward; applying the change twice in silence would be wrong."""
    with pytest.raises(disco_client.UnsupportedCall, match="inplace operation"):
        disco_client.checkpoint(lambda h: torch.sin(h.mul_(2)), source() * 1.0)
    assert disco_client.stats().live_blobs == 0


def test_small_input_changed_later_is_refused_as_by_torch() -> None:
    """Saved-tensor hooks switch torch's own check off; it must not be lost for what is kept."""
    scale = torch.ones(4, requires_grad=True) * 1.0
    output = disco_client.checkpoint(lambda h, s: torch.sin(h) * s.sum(), source() * 1.0, scale)
    with torch.no_grad():
        scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_parameters_are_not_offloaded() -> None:
    """A weight passed as an argument is alive anyway: copying it would only cost."""
    weight = nn.Parameter(torch.randn(ROWS, WIDTH))
    hidden = torch.randn(8, WIDTH, requires_grad=True)
    disco_client.checkpoint(nn.functional.linear, hidden * 1.0, weight).sum().backward()
    assert disco_client.stats().saved_bytes == 0


def test_options_of_torch_pass_through() -> None:
    """preserve_rng_state and the others are torch's options, not the function's arguments."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        leaf, module = source(), layer()
        for options in (
            {"preserve_rng_state": True},
            {"determinism_check": "none"},
            {"debug": True},
        ):
            checkpoint(module, leaf * 1.0, **options).sum().backward()
        return [leaf.grad]

    compare(build)


def test_strides_of_the_recomputation() -> None:
    """A permuted input must come back with the same strides, or kernels may differ by a bit."""
    strides = []

    def run(h: torch.Tensor) -> torch.Tensor:
        strides.append(h.stride())
        return torch.sin(h)

    leaf = torch.randn(64, 64, 128, requires_grad=True)
    disco_client.checkpoint(run, (leaf * 1.0).permute(2, 0, 1)).sum().backward()
    assert len(strides) == 2
    assert strides[0] == strides[1]


def test_subclass_stays_in_memory_and_keeps_its_type(caplog: pytest.LogCaptureFixture) -> None:
    """A wrapper must never reach the recomputation as a plain tensor; one warning says so."""

    class Wrapped(torch.Tensor):
        pass

    types = []

    def run(h: torch.Tensor) -> torch.Tensor:
        types.append(type(h))
        return torch.sin(h)

    for _ in range(3):
        leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
        disco_client.checkpoint(run, (leaf * 1.0).as_subclass(Wrapped)).sum().backward()
    assert set(types) == {Wrapped}
    assert disco_client.stats().saved_bytes == 0
    assert len([r for r in caplog.records if "Wrapped" in r.message]) == 1


def test_a_buffer_that_is_filled_anew_is_another_input() -> None:
    """Loaders and numpy fill a buffer without autograd's notice: its old bytes are not its new."""
    weight = torch.eye(WIDTH).requires_grad_()
    buffer = torch.ones(ROWS, WIDTH)
    first = disco_client.checkpoint(lambda h: h @ weight, buffer)
    buffer.data.fill_(3.0)
    disco_client.checkpoint(lambda h: h @ weight, buffer).sum().backward()
    assert weight.grad is not None
    assert weight.grad[0, 0] == 3 * ROWS
    assert disco_client.stats().live_blobs == 1
    del first
    first = disco_client.checkpoint(lambda h: h @ weight, buffer)
    second = disco_client.checkpoint(lambda h: h @ weight, buffer)
    assert disco_client.stats().live_blobs == 1
    del first, second


def test_attributes_of_inputs_reach_the_recomputation() -> None:
    """autograd hands leaves back as they are, attributes included."""

    def build(checkpoint: Callable[..., Any]) -> list[torch.Tensor]:
        leaf = source()
        small, large = torch.ones(4), torch.ones(ROWS, WIDTH)
        small.scale, large.scale = 2.0, 3.0

        def run(h: torch.Tensor, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return torch.sin(h) * s.scale * m.scale

        checkpoint(run, leaf * 1.0, small, large).sum().backward()
        return [leaf.grad]

    compare(build)
    assert disco_client.stats().saved_bytes == ROWS * WIDTH * 4


def test_nested_tensors_stay_in_memory() -> None:
    """They have no strides of their own; asking for them is an internal error of torch."""
    rows = [torch.randn(600, WIDTH), torch.randn(700, WIDTH)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
        nested = torch.nested.nested_tensor(rows)
        weight = torch.eye(WIDTH, requires_grad=True)
        padded = disco_client.checkpoint(
            lambda n: torch.nested.to_padded_tensor(n, 0.0) @ weight, nested
        )
        padded.sum().backward()
    assert weight.grad is not None
    assert disco_client.stats().saved_bytes == 0
