"""The forms in which discod is called, each beside the torch form that it must equal to the bit.

A *pattern* is a function that builds a graph through ``apply(function, *args, **kwargs)``, runs
backward, and returns every tensor that matters. :func:`compare` runs it with torch's form and with
discod's from the same seed.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

import disco_client
from disco_client.patches import torch as torch_patch

ROWS = 64
WIDTH = 32
"""A float32 tensor of ROWS x WIDTH is 8 KiB, above the MIN_BYTES that the tests attach with."""

MIN_BYTES = "4KiB"

Apply = Callable[..., Any]
Pattern = Callable[[Apply], list[torch.Tensor | None]]


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def _reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True, **kwargs)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """The torch patch, for the time of a block."""
    torch_patch.enable()
    try:
        yield
    finally:
        torch_patch.disable()


@dataclass(frozen=True)
class Form:
    """One way to use discod.

    Attributes:
        apply: Calls a function through it.
        oracle: torch's way, for the same.
        around: A context for all that discod's side does.
    """

    name: str
    apply: Apply
    oracle: Apply
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def __str__(self) -> str:
        return self.name


CHECKPOINT = Form("checkpoint", disco_client.checkpoint, _non_reentrant)
PATCHED = Form("patched", _non_reentrant, _non_reentrant, patched)
PATCHED_REENTRANT = Form("patched-reentrant", _reentrant, _reentrant, patched)
DISCO = Form("disco", disco_client.Disco.apply, _reentrant)
OFFLOAD = Form("offload", _plainly, _plainly, disco_client.offload)

ALL = (CHECKPOINT, PATCHED, PATCHED_REENTRANT, DISCO, OFFLOAD)
NOT_REENTRANT = (CHECKPOINT, PATCHED, OFFLOAD)
RECOMPUTING = (CHECKPOINT, PATCHED, PATCHED_REENTRANT, DISCO)


def leaf(rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    """An input that requires a gradient."""
    return torch.randn(rows, width, requires_grad=True)


def layer() -> torch.nn.Module:
    """A layer with dropout."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.3)
    )


def grads(*sources: torch.Tensor | torch.nn.Module) -> list[torch.Tensor | None]:
    """The gradients of tensors and of all parameters of modules."""
    found: list[torch.Tensor | None] = []
    for source in sources:
        if isinstance(source, torch.nn.Module):
            found += [parameter.grad for parameter in source.parameters()]
        else:
            found.append(source.grad)
    return found


def run(pattern: Pattern, apply: Apply) -> list[torch.Tensor | None]:
    """The pattern's tensors, and the random state that it leaves."""
    torch.manual_seed(0)
    tensors = pattern(apply)
    return [*tensors, torch.get_rng_state()]


def compare(form: Form, pattern: Pattern, *, saves: bool = True) -> None:
    """Assert that discod's form equals torch's to the bit, offloads something, and frees it."""
    expected = run(pattern, form.oracle)
    before = disco_client.stats().saved_blobs
    with form.around():
        got = run(pattern, form.apply)
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one is None) == (other is None), f"tensor {index}: {one} for {other}"
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other), f"tensor {index} differs"
    stats = disco_client.stats()
    assert (stats.saved_blobs > before) == saves, "offloaded" if not saves else "nothing offloaded"
    assert stats.live_blobs == 0
