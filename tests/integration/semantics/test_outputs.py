"""What comes out of a checkpointed call: containers, integers, tensors without a gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disco_client
from tests.helpers.forms import (
    ALL,
    CHECKPOINT,
    DISCO,
    NOT_REENTRANT,
    RECOMPUTING,
    WIDTH,
    Apply,
    Form,
    compare,
    grads,
    layer,
    leaf,
)

RETURNS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": torch.sin,
    "1-tuple": lambda h: (torch.sin(h),),
    "3-tuple": lambda h: (torch.sin(h), torch.cos(h), torch.tanh(h)),
}


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("form", ALL, ids=str)
def test_containers_come_back_as_they_are(form: Form, returns: str) -> None:
    """Newer models return a bare tensor where older ones return a tuple."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        output = apply(RETURNS[returns], x * 1.0)
        assert type(output) is type(RETURNS[returns](x))
        outputs = [output] if isinstance(output, torch.Tensor) else list(output)
        torch.stack(outputs).sum().backward()
        return [x.grad]

    compare(form, pattern)


@pytest.mark.parametrize("form", [*NOT_REENTRANT, DISCO], ids=str)
def test_lists_keep_their_gradients(form: Form) -> None:
    """torch's reentrant form returns a list whose tensors have lost theirs; Disco's has them."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        output = apply(lambda h: [module(h), torch.cos(h)], x * 1.0)
        assert type(output) is list
        torch.stack(output).sum().backward()
        return grads(x, module)

    compare(dataclasses.replace(form, oracle=CHECKPOINT.oracle), pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_outputs_that_need_no_gradient(form: Form) -> None:
    """Integer, None and detached outputs keep requires_grad=False."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        output, index, nothing, detached = apply(
            lambda h: (module(h), h.argmax(-1), None, h.detach() * 2), x * 1.0
        )
        assert nothing is None
        assert not index.requires_grad
        assert not detached.requires_grad
        output.sum().backward()
        return [index, detached, *grads(x, module)]

    compare(form, pattern)


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_integer_and_none_outputs(form: Form) -> None:
    """Beside a tensor with a gradient, they must not get one in any form."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        output, index, nothing = apply(lambda h: (module(h), h.argmax(-1), None), x * 1.0)
        assert nothing is None
        assert not index.requires_grad
        output.sum().backward()
        return [index, *grads(x, module)]

    compare(form, pattern)


@dataclasses.dataclass
class ModelOutput:
    """What a model of a library may return."""

    hidden: torch.Tensor


MAPPINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda h: {"a": torch.sin(h), "b": [h.detach() * 2, None, 7]},
    "dataclass": lambda h: ModelOutput(torch.sin(h)),
    "nested": lambda h: (torch.sin(h), [torch.cos(h)]),
}


@pytest.mark.parametrize("returns", MAPPINGS)
@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_mappings_and_dataclasses_keep_their_gradients(form: Form, returns: str) -> None:
    """The reentrant form loses them in silence; this one does not."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        output = apply(MAPPINGS[returns], x * 1.0)
        first = {
            "dict": lambda: output["a"],
            "dataclass": lambda: output.hidden,
            "nested": lambda: output[0] + output[1][0],
        }[returns]()
        first.sum().backward()
        return [x.grad]

    compare(form, pattern)


@pytest.mark.parametrize("returns", MAPPINGS)
def test_disco_refuses_what_would_lose_gradients(returns: str) -> None:
    """At the call, naming the type and what to use; not by requires_grad=False in silence."""
    with pytest.raises(TypeError, match=r"disco_client\.checkpoint"):
        disco_client.Disco.apply(MAPPINGS[returns], leaf() * 1.0)
    assert disco_client.stats().live_blobs == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("form", ALL, ids=str)
def test_nothing_needs_a_gradient(form: Form) -> None:
    """A frozen layer with an input without grad: no gradient is forced on it, nothing is kept."""
    module = layer().requires_grad_(False)
    with form.around():
        output = form.apply(module, torch.randn(64, WIDTH))
        assert not output.requires_grad
        assert disco_client.stats().live_blobs == 0
