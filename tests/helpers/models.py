"""Models for the tests: small, with everything that a recomputation could get wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Checkpoint = Callable[..., Any]


class Block(nn.Module):
    """A transformer layer with dropout, and extra tensor arguments that need gradients."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(
        self, hidden: torch.Tensor, rotary: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        batch, length, width = hidden.shape
        normed = self.norm1(hidden) * scale + rotary
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(normed).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = hidden + functional.dropout(attended, self.dropout, self.training)
        grown = self.down(functional.gelu(self.up(self.norm2(hidden))))
        return hidden + functional.dropout(grown, self.dropout, self.training)


class GPT(nn.Module):
    """A byte-level GPT; each layer runs through ``checkpoint(layer, hidden, rotary, scale)``.

    ``rotary`` is large, needs grad and is shared by all layers; ``scale`` is small and needs grad.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        layers: int = 12,
        width: int = 64,
        heads: int = 4,
        length: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        rotary = torch.sin(self.position).expand(len(tokens), -1, -1) * 1.0
        scale = self.scale * 1.0
        for block in self.blocks:
            hidden = self.checkpoint(block, hidden, rotary, scale)
        return self.head(self.norm(hidden))


def plain_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The oracle."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The oracle of ``Disco``."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)
