"""Which saves share a blob: equal bytes do, and nothing else does."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import nn

import disco_client
from tests.helpers.forms import ALL, OFFLOAD, ROWS, WIDTH, Apply, Form, compare, layer, leaf


def test_shared_inputs_are_stored_once() -> None:
    """Position embeddings that all layers get are one blob; a changed version is another."""
    shared, module = leaf() * 1.0, layer()
    outputs = [disco_client.checkpoint(lambda h: module(h).sum(), shared) for _ in range(4)]
    assert disco_client.stats().live_blobs == 1
    with torch.no_grad():
        shared.add_(1)
    outputs.append(disco_client.checkpoint(lambda h: module(h).sum(), shared))
    outputs.append(disco_client.checkpoint(lambda h: module(h).sum(), shared[1:]))
    assert disco_client.stats().live_blobs == 3
    del outputs
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("form", ALL, ids=str)
def test_a_new_storage_at_an_old_address_is_another_blob(form: Form) -> None:
    """Sharing by a raw address would hand one layer's bytes to another."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        outputs, x = [], leaf()
        for i in range(20):
            hidden = x * float(i)
            outputs.append(apply(torch.sin, hidden))
            del hidden
        torch.stack([output.sum() for output in outputs]).sum().backward()
        return [x.grad]

    compare(form, pattern)


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


@pytest.mark.parametrize("view", ["same", "flat", "transposed", "rows"])
def test_one_storage_is_stored_once(view: str) -> None:
    """Two operations that save one tensor, whatever view each has of it."""
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "same": lambda t: t,
        "flat": lambda t: t.view(-1),
        "transposed": lambda t: t.t(),
        "rows": lambda t: t.view(2, -1, WIDTH),
    }
    x = leaf()
    with disco_client.offload():
        hidden = x * 1.0
        loss = torch.sin(hidden).sum() + torch.cos(views[view](hidden)).sum()
    assert disco_client.stats().saved_blobs == 1
    loss.backward()
    assert torch.allclose(x.grad, torch.cos(x) - torch.sin(x))
    assert disco_client.stats().live_blobs == 0


def test_a_new_version_is_another_blob() -> None:
    """Stored once means: as long as it was not changed."""
    x = leaf()
    with disco_client.offload():
        hidden = x * 1.0
        one = torch.sin(hidden).sum()
        with torch.no_grad():
            hidden.add_(1)
        two = torch.sin(hidden).sum()
    assert disco_client.stats().saved_blobs == 2
    (one + two).backward()
    assert torch.equal(x.grad, torch.cos(x.detach()) + torch.cos(x.detach() + 1))


def test_saved_outputs_and_inputs_are_one() -> None:
    """exp saves its output, and the product after it saves the same tensor as its input."""
    x, weight = leaf(), nn.Parameter(torch.randn(WIDTH, WIDTH))
    with disco_client.offload():
        loss = (torch.exp(x * 1.0) @ weight).sum()
    assert disco_client.stats().saved_blobs == 1
    loss.backward()


def _through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(2)


def _through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[:] *= 2


def _by_a_kernel(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 0, tensor.numel() * 2)


@pytest.mark.parametrize("change", [_through_data, _through_numpy, _by_a_kernel])
def test_activation_changed_without_notice(change: Callable[[torch.Tensor], None]) -> None:
    """The product saves the changed values, though autograd knows of no new version."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.randn(WIDTH, WIDTH))

        def run(h: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(h)
            change(hidden)
            return hidden @ weight

        apply(run, x * 1.0).sum().backward()
        return [weight.grad]

    compare(OFFLOAD, pattern)


def test_data_of_an_activation_is_a_tensor_of_its_own() -> None:
    """It has a count of versions of its own, from 0 each time that it is asked for."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.randn(ROWS, WIDTH))

        def run(h: torch.Tensor) -> torch.Tensor:
            hidden = h * 1.0
            first = torch.sin(hidden)
            hidden.data.mul_(2)
            return first + weight * hidden.data

        apply(run, x * 1.0).sum().backward()
        return [weight.grad]

    compare(OFFLOAD, pattern)
