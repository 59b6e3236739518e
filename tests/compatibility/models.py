"""The models of the rows: tiny, and each with one thing that wrappers and recomputation dislike."""

import torch
from torch import nn
from torch.nn import functional

from tests.compatibility.forms import Call

WIDTH = 32
LENGTH = 8
BATCH = 4
MIN_BYTES = "1KiB"
"""Hidden states are 4 KiB in float32 and 2 KiB in bfloat16; statistics of the norms are less."""


class Block(nn.Module):
    """A residual layer with dropout, so that the random state counts.

    It keeps the dtypes that it sees, of its input and inside, in each pass.
    """

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self._dtypes: list[list[str]] = []
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = functional.gelu(self.up(self.norm(hidden)))
        self._dtypes.append([str(hidden.dtype), str(wide.dtype)])
        grown = self.down(wide)
        return hidden + functional.dropout(grown, self.dropout, self.training)

    def take_dtypes(self) -> list[list[str]]:
        """The dtypes of every pass since the last call."""
        taken, self._dtypes = self._dtypes, []
        return taken


class BlockWithSpare(Block):
    """A layer that owns a parameter which its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH))


class LowRankBlock(nn.Module):
    """A frozen layer with trainable low-rank matrices beside it, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Block().requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


class Net(nn.Module):
    """Embedding, layers run by a form, and a head.

    Args:
        call: How a layer is run: ``call(layer, hidden)``.
        blocks: The layers.
        order: Which layer runs when; by default each once.
    """

    def __init__(
        self, call: Call, blocks: list[nn.Module], order: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.call = call
        self.order = order or tuple(range(len(blocks)))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """The hidden states of the first layer."""
        return self.embed(inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for position in self.order:
            hidden = self.call(self.blocks[position], hidden)
        return self.head(hidden)


class FrozenEmbedding(Net):
    """A net whose first hidden states need no gradient."""

    def __init__(self, call: Call, blocks: list[nn.Module]) -> None:
        super().__init__(call, blocks)
        self.embed.requires_grad_(False)


class FrozenEmbeddingWithGrad(FrozenEmbedding):
    """The usual remedy: hidden states that need a gradient, which nobody uses."""

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().enter(inputs).requires_grad_()


def plain(call: Call) -> Net:
    """Three layers."""
    return Net(call, [Block(), Block(), Block()])


def shared(call: Call) -> Net:
    """Two layers, of which the first runs twice."""
    return Net(call, [Block(), Block()], order=(0, 1, 0))


def unused(call: Call) -> Net:
    """Two layers with a parameter that gets no gradient."""
    return Net(call, [BlockWithSpare(), BlockWithSpare()])


def frozen(call: Call) -> Net:
    """Low-rank training on a frozen base, hidden states without gradient."""
    return FrozenEmbedding(call, [LowRankBlock(), LowRankBlock()])


def frozen_with_grad(call: Call) -> Net:
    """Low-rank training on a frozen base, hidden states that need a gradient."""
    return FrozenEmbeddingWithGrad(call, [LowRankBlock(), LowRankBlock()])
