"""``Disco``: torch's reentrant checkpoint exactly, and a clear error for what that form loses."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import disco_client
from disco_client import Disco, UnsupportedCall

Attach = Callable[..., None]
WIDTH = 256
ROWS = 1024


@pytest.fixture(autouse=True)
def attached(attach: Attach) -> None:
    attach(arena="8MiB")


def source() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3))


def forms(module: nn.Module) -> dict[str, Callable[..., Any]]:
    return {
        "module": module,
        "bound method": module.forward,
        "lambda": lambda h: module(h),
        "partial": functools.partial(module.__call__),
        "nested partial": functools.partial(functools.partial(module)),
    }


@pytest.mark.parametrize("name", forms(nn.Identity()))
def test_every_form_of_a_function(name: str) -> None:
    """Frameworks pass modules, methods, lambdas and partials."""
    grads = []
    for apply in (
        lambda f, h: torch.utils.checkpoint.checkpoint(f, h, use_reentrant=True),
        Disco.apply,
    ):
        torch.manual_seed(3)
        module, leaf = layer(), source()
        apply(forms(module)[name], leaf * 1.0).sum().backward()
        grads.append([leaf.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_every_tensor_argument_gets_its_gradient() -> None:
    """Axolotl's Disco returns None for every extra argument."""
    grads = []
    for apply in (
        lambda f, *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=True),
        Disco.apply,
    ):
        torch.manual_seed(3)
        leaf, other, flags = source(), source(), torch.arange(ROWS)
        out = apply(
            lambda h, n, o, i: torch.sin(h)[i] * o * 2, leaf * 1.0, None, other * 1.0, flags
        )
        out.sum().backward()
        grads.append([leaf.grad, other.grad])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "returns",
    [
        lambda h: torch.sin(h),
        lambda h: (torch.sin(h),),
        lambda h: (torch.sin(h), h.argmax(-1), None),
        lambda h: [torch.sin(h), torch.cos(h)],
    ],
    ids=["tensor", "1-tuple", "3-tuple", "list"],
)
def test_outputs_keep_their_container(returns: Callable[..., Any]) -> None:
    """Newer models return a bare tensor where older ones return a tuple."""
    leaf, plain = source(), source()
    plain.data.copy_(leaf.data)
    out, expected = Disco.apply(returns, leaf * 1.0), returns(plain * 1.0)
    assert type(out) is type(expected)
    first = out if isinstance(out, torch.Tensor) else out[0]
    (expected if isinstance(expected, torch.Tensor) else expected[0]).sum().backward()
    first.sum().backward()
    assert torch.equal(leaf.grad, plain.grad)


@dataclasses.dataclass
class ModelOutput:
    hidden: torch.Tensor


@pytest.mark.parametrize(
    "returns",
    [lambda h: {"a": torch.sin(h)}, ModelOutput, lambda h: (torch.sin(h), [torch.cos(h)])],
    ids=["dict", "dataclass", "nested"],
)
def test_containers_that_would_lose_gradients_are_refused(returns: Callable[..., Any]) -> None:
    """The reentrant form silently gives requires_grad=False for them."""
    with pytest.raises(TypeError, match=r"disco_client\.checkpoint"):
        Disco.apply(returns, source() * 1.0)
    assert disco_client.stats().live_blobs == 0


def test_keyword_arguments_are_refused_by_name() -> None:
    """They would be dropped, or lose their gradient."""
    with pytest.raises(TypeError, match=r"scale.*disco_client\.checkpoint"):
        Disco.apply(lambda h, scale: h, source(), scale=3)


def test_frozen_input_with_trainable_layer_is_refused() -> None:
    """Behind a frozen embedding the reentrant form trains nothing, with a warning at most."""
    with pytest.raises(UnsupportedCall, match="requires_grad_"):
        Disco.apply(layer(), source().detach())


def test_frozen_input_and_frozen_layer() -> None:
    """Nothing needs a gradient: the output does not get one forced on it, nothing is saved."""
    module = layer().requires_grad_(False)
    assert not Disco.apply(module, source().detach()).requires_grad
    assert disco_client.stats().saved_bytes == 0


@pytest.mark.parametrize("where", ["partial", "container", "closure"])
def test_hidden_tensors_with_history_are_refused(where: str) -> None:
    """Closed over, their graph would be freed by the first layer or their gradient lost."""
    carried = source() * 2

    def run(h: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return h

    function = {
        "partial": functools.partial(run, extra=carried),
        "container": functools.partial(run, extra={"k": [carried]}),
        "closure": lambda h: h * carried,
    }[where]
    with pytest.raises(UnsupportedCall, match="autograd history"):
        Disco.apply(function, source() * 1.0)


def test_double_backward_is_refused() -> None:
    """The reentrant form drops the second-order gradient in silence."""
    leaf = source()
    output = Disco.apply(torch.sin, leaf * 1.0)
    with pytest.raises(UnsupportedCall, match="twice"):
        output.sum().backward(create_graph=True)


def test_autograd_grad_is_refused() -> None:
    """As in torch's reentrant form."""
    leaf = source()
    output = Disco.apply(torch.sin, leaf * 1.0)
    with pytest.raises(UnsupportedCall, match=r"torch\.autograd\.grad"):
        torch.autograd.grad(output.sum(), leaf)


def test_settings() -> None:
    """The settings reach the manager: equal ones share it, a nonsense one is refused."""
    assert Disco.get_instance() is Disco.get_instance()
    assert Disco.get_instance(prefetch_size=2) is not Disco.get_instance()
    leaf = source()
    Disco.apply(torch.sin, leaf * 1.0, prefetch_size=2, save_workers=1).sum().backward()
    assert torch.equal(leaf.grad, torch.cos(leaf.detach()))
    with pytest.raises(ValueError, match="save_workers=0"):
        Disco.apply(torch.sin, source() * 1.0, save_workers=0)
