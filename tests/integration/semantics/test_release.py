"""A blob lives exactly as long as the graph that needs it, without the garbage collector."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disco_client
from tests.helpers.forms import RECOMPUTING

SIZE = 1 << 12
"""Elements of a hidden state: 16 KiB of float32."""


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """Cycles must not be what keeps a blob, so nothing may break them here."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=RECOMPUTING, ids=str)
def form(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each form's call, inside of what it needs around it."""
    with request.param.around():
        yield request.param.apply


def hidden() -> torch.Tensor:
    return torch.randn(SIZE, requires_grad=True) * 1.0


def live() -> int:
    return disco_client.stats().live_blobs


def test_dropped_outputs_release_the_blob(form: Any) -> None:
    """Evaluation in train mode without no_grad: outputs dropped, nothing may stay."""
    output = form(torch.sin, form(torch.cos, hidden()))
    assert live() == 2
    del output
    assert live() == 0


def test_backward_releases_each_blob_in_turn(form: Any) -> None:
    """The layer's blob goes when its backward is done, though the output still lives."""
    output = form(torch.sin, form(torch.cos, hidden()))
    output.sum().backward()
    assert live() == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_no_grad_saves_nothing(form: Any) -> None:
    """Generation and evaluation under no_grad cost nothing."""
    with torch.no_grad():
        form(torch.sin, hidden())
    assert disco_client.stats().saved_bytes == 0


def test_exception_in_forward(form: Any) -> None:
    """An out-of-memory error in a layer leaves no blob behind, and is the user's own error."""

    def fail(h: torch.Tensor) -> torch.Tensor:
        raise ValueError("the layer's own error")

    with pytest.raises(ValueError, match="the layer's own error"):
        form(fail, form(torch.cos, hidden()))
    assert live() == 0


def test_exception_in_recomputation(form: Any) -> None:
    """The user's error comes out of backward as it is; a retry works and nothing stays."""
    calls = []

    def fails_once_in_backward(h: torch.Tensor) -> torch.Tensor:
        calls.append(h)
        if len(calls) == 2:
            raise ValueError("the layer's own error")
        return torch.sin(h)

    output = form(fails_once_in_backward, form(torch.cos, hidden()))
    with pytest.raises(ValueError, match="the layer's own error"):
        output.sum().backward()
    del output
    calls.clear()
    assert live() == 0


def test_the_source_is_freed_at_once(form: Any) -> None:
    """Offloading that keeps a reference to the activation frees nothing."""
    source = hidden()
    gone = weakref.ref(source)
    output = form(nn.Flatten(0), source)
    output = form(torch.sin, output)
    del source
    assert gone() is None
    output.sum().backward()


def test_skipped_backward_then_a_normal_step(form: Any) -> None:
    """A step that is skipped for a NaN loss must not disturb the next one."""
    skipped = form(torch.sin, hidden())
    kept = form(torch.cos, hidden())
    del skipped
    kept.sum().backward()
    assert live() == 0


def test_retain_graph_and_second_backward(form: Any) -> None:
    """retain_graph=True keeps the blob; the second backward gives the same gradient again."""
    leaf = torch.randn(SIZE, requires_grad=True)
    output = form(torch.sin, leaf * 1.0)
    output.sum().backward(retain_graph=True)
    assert live() == 1
    first = leaf.grad.clone()
    output.sum().backward()
    assert torch.equal(leaf.grad, first * 2)
    assert live() == 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


def test_many_rounds_leave_nothing() -> None:
    """5,000 saves that are cleaned up at once: no blob, no bytes, no growing table."""
    manager = disco_client.DiskOffloadManager()
    tensor = torch.ones(16)
    for _ in range(5000):
        manager.cleanup_tensor(manager.save_tensor(tensor))
    assert live() == 0
    assert not manager._handles
