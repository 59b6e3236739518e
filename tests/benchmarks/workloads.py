"""The models that the training benchmark steps, and how they are checkpointed.

No dropout: Axolotl's ``Disco`` does not restore the random state, so it would train differently.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.demo.model import GPT, batch, standard_library_text

Checkpoint = Callable[[nn.Module, Tensor], Tensor]
"""Calls a layer on its input so that only the input is kept until backward."""

GPT_WIDTH = 128
GPT_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Workload:
    """What one rank trains.

    Attributes:
        layers: Checkpointed layers; each keeps its input until backward.
        hidden_bytes: Bytes of one input (float32): whole huge pages (2 MiB), as the arena has.
        width: Its last dimension.
        inner: Width inside the MLP, which decides how much compute there is per byte; 0: the
            layers are those of the demo's GPT, with attention.
        ranks: DDP ranks, over gloo.
        threads: Of each rank; 0: the cores, divided by the ranks.
    """

    layers: int
    hidden_bytes: int
    width: int
    inner: int
    ranks: int = 1
    threads: int = 0

    @property
    def activation_bytes(self) -> int:
        """What plain checkpointing keeps until backward, per rank."""
        return self.layers * self.hidden_bytes

    def arena_bytes(self, share: float) -> int:
        """``share`` of the activations in whole inputs, since a part of one holds nothing.

        At least three: one in use, one on its way in, one on its way out.
        """
        return max(3, round(share * self.layers)) * self.hidden_bytes


class Layer(nn.Module):
    """A residual MLP with its norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.relu(self.up(self.norm(hidden)))
        return hidden + self.down(inner)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A stack of layers; the output is the loss."""

    def __init__(self, workload: Workload, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self.scale = nn.Parameter(torch.ones(workload.width))
        self.layers = nn.ModuleList(
            Layer(workload.width, workload.inner) for _ in range(workload.layers)
        )

    def forward(self, data: Tensor) -> Tensor:
        hidden = data * self.scale
        for layer in self.layers:
            hidden = self._checkpoint(layer, hidden)
        return hidden.square().mean()


def make_model(workload: Workload, checkpoint: Checkpoint) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    if workload.inner:
        return Residual(workload, checkpoint)
    return GPT(
        layers=workload.layers,
        width=workload.width,
        length=GPT_LENGTH,
        checkpoint=checkpoint,
        dropout=0.0,
    )


def make_batch(workload: Workload, seed: int) -> Tensor:
    """The same data for equal seeds."""
    if workload.inner:
        generator = torch.Generator().manual_seed(seed)
        rows = workload.hidden_bytes // (workload.width * 4)
        return torch.randn(rows, workload.width, generator=generator)
    rows = workload.hidden_bytes // (workload.width * GPT_LENGTH * 4)
    return batch(standard_library_text(), seed=seed, rows=rows, length=GPT_LENGTH)
