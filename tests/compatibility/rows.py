"""What a row is, and the shapes that a training step can have."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.compatibility.forms import Call, Form
from tests.compatibility.models import BATCH, LENGTH, WIDTH

Step = Callable[[nn.Module, Form], list[float]]


@dataclass(frozen=True)
class Row:
    """One row of the matrix.

    Attributes:
        table: The table it is in.
        model, setting: Its first two columns.
        build: Makes the wrapped model whose layers the given function runs.
        step: Forward and backward, as often as a step has them; returns the losses.
        same_gradients: Whether all ranks must have the same gradients after a step.
        sharded: Whether every parameter must be sharded after a step.
        same_data: Whether all ranks train on the same data.
    """

    table: str
    model: str
    setting: str
    build: Callable[[Call], nn.Module]
    step: Step
    same_gradients: bool = False
    sharded: bool = False
    same_data: bool = False

    @property
    def key(self) -> str:
        """Unique among all rows."""
        return f"{self.table} | {self.model} | {self.setting}"


def forward(model: nn.Module, form: Form) -> torch.Tensor:
    """The loss of one random batch."""
    inputs = torch.randn(BATCH, LENGTH, WIDTH)
    with form.around():
        loss: torch.Tensor = model(inputs).float().square().mean()
    return loss


def one_backward(model: nn.Module, form: Form) -> list[float]:
    """One forward, one backward."""
    loss = forward(model, form)
    loss.backward()
    return [loss.item()]


def two_forwards(model: nn.Module, form: Form) -> list[float]:
    """Two forwards before one backward, as contrastive and preference losses have them."""
    losses = [forward(model, form), forward(model, form)]
    torch.stack(losses).sum().backward()
    return [loss.item() for loss in losses]


def accumulate_in_ddp(model: Any, form: Form) -> list[float]:
    """Two backwards, and gradients are reduced in the second."""
    with model.no_sync():
        first = one_backward(model, form)
    return first + one_backward(model, form)


def accumulate_in_fsdp(model: Any, form: Form) -> list[float]:
    """The same in FSDP2's words."""
    model.set_requires_gradient_sync(False)
    first = one_backward(model, form)
    model.set_requires_gradient_sync(True)
    return first + one_backward(model, form)
