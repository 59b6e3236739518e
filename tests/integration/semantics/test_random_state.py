"""Recomputation under the forward's random state and autocast."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.forms import (
    ALL,
    NOT_REENTRANT,
    WIDTH,
    Apply,
    Form,
    compare,
    grads,
    layer,
    leaf,
)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_dropout(form: Form) -> None:
    """Fresh dropout masks in the recomputation make the loss diverge, without any error."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, one, two = leaf(), layer(), layer()
        output = apply(two, apply(one, x * 1.0))
        output.sum().backward()
        return [output.detach(), *grads(x, one, two)]

    compare(form, pattern)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_random_state_can_be_left_alone(form: Form) -> None:
    """preserve_rng_state=False is torch's option, and changes what the next random number is."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), nn.Linear(WIDTH, WIDTH)
        options = {} if form.name in ("disco", "offload") else {"preserve_rng_state": False}
        apply(module, x * 1.0, **options).sum().backward()
        return [torch.rand(3), *grads(x, module)]

    compare(form, pattern)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_other_random_generators_as_in_torch(form: Form) -> None:
    """torch restores neither Python's nor numpy's: discod gives what torch gives."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        random.seed(1)
        generator = np.random.default_rng(1)
        x = leaf()
        output = apply(lambda h: torch.sin(h) * random.random() * generator.random(), x * 1.0)
        output.sum().backward()
        return [output.detach(), x.grad, torch.tensor([random.random(), generator.random()])]

    compare(form, pattern)


class Mixed(nn.Module):
    """Casts to the autocast dtype, and beside it an operation in float."""

    def __init__(self, inner: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.seen: list[tuple[bool, torch.dtype]] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.linear(hidden)
        self.seen.append((torch.is_autocast_enabled("cpu"), mixed.dtype))
        with torch.autocast("cpu", enabled=self.inner):
            return torch.softmax(self.linear(mixed.float()).float(), -1) + hidden


@pytest.mark.parametrize("inner", [True, False], ids=["throughout", "off inside"])
@pytest.mark.parametrize("form", ALL, ids=str)
def test_autocast_of_the_forward(form: Form, inner: bool) -> None:
    """Backward runs outside of autocast; the recomputation must not."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), Mixed(inner)
        with torch.autocast("cpu", torch.bfloat16):
            output = apply(module, x * 1.0)
            loss = output.float().sum() + module.linear(x).float().sum()
        loss.backward()
        assert len(set(module.seen)) == 1
        assert module.seen[0] == (True, torch.bfloat16)
        return [output.detach(), *grads(x, module)]

    compare(form, pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_backward_inside_another_autocast(form: Form) -> None:
    """The recomputation has the forward's autocast, whatever backward is run in."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), Mixed()
        loss = apply(module, x * 1.0).float().sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return grads(x, module)

    compare(form, pattern)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_weight_cast_cached_by_autocast(form: Form) -> None:
    """One weight used in two calls and beside them, under one autocast with its weight cache."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, linear = leaf(), nn.Linear(WIDTH, WIDTH)
        with torch.autocast("cpu", torch.bfloat16):
            hidden: Any = linear(x)
            hidden = apply(linear, hidden * 1.0)
            hidden = apply(linear, hidden * 1.0)
        hidden.float().sum().backward()
        return [hidden.detach(), *grads(x, linear)]

    compare(form, pattern)
