"""A stack of Llama-like blocks, and one step of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

Apply = Callable[..., Any]
"""How a block is run: ``apply(block, hidden)``."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A stack and its input."""

    layers: int
    width: int
    batch: int
    length: int
    head_width: int = 128

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def hidden_bytes(self, dtype: torch.dtype) -> int:
        """What the input of one block takes."""
        return self.tokens * self.width * dtype.itemsize


class Block(nn.Module):
    """RMSNorm, causal attention, RMSNorm, SwiGLU; dropout after both."""

    def __init__(self, width: int, head_width: int, dropout: float) -> None:
        super().__init__()
        inner = width * 8 // 3 // 64 * 64
        self.head_width = head_width
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            part.view(batch, length, -1, self.head_width).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = hidden + functional.dropout(mixed, self.dropout)
        normed = self.mlp_norm(hidden)
        grown = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return hidden + functional.dropout(grown, self.dropout)


class Stack(nn.Module):
    """The blocks. The first one's input is made here, so that nobody else holds it."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape.width))
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.head_width, dropout) for _ in range(shape.layers)
        )

    def forward(self, inputs: Tensor, apply: Apply) -> Tensor:
        hidden = inputs * self.scale
        for block in self.blocks:
            hidden = apply(block, hidden)
        return hidden


@dataclass(slots=True)
class Task:
    """A stack with what it is fed, and the gradient that its output gets."""

    stack: Stack
    inputs: Tensor
    upstream: Tensor

    @classmethod
    def make(
        cls, shape: Shape, device: torch.device, dtype: torch.dtype, dropout: float = 0.0
    ) -> "Task":
        """The same numbers each time."""
        torch.manual_seed(0)
        with torch.device(device):
            stack = Stack(shape, dropout).to(dtype)
            inputs, upstream = (
                torch.randn(shape.batch, shape.length, shape.width).to(dtype) for _ in range(2)
            )
        return cls(stack, inputs, upstream)

    def step(
        self, apply: Apply, between: Callable[[], object] = lambda: None, autocast: bool = False
    ) -> Tensor:
        """Forward, ``between()``, backward; the output. The gradients are the parameters' own.

        Their memory is there from the second step on, so that a peak is not one of theirs.
        """
        self.stack.zero_grad(set_to_none=False)
        kind = self.inputs.device.type
        around: AbstractContextManager[Any] = (
            torch.autocast(kind, torch.bfloat16) if autocast else nullcontext()
        )
        with around:
            output: Tensor = self.stack(self.inputs, apply)
        between()
        output.backward(self.upstream.to(output.dtype))
        return output.detach()

    def gradients(self) -> list[Tensor]:
        """Copies of those of all parameters."""
        return [p.grad.clone() for p in self.stack.parameters() if p.grad is not None]


def plain(block: nn.Module, hidden: Tensor) -> Any:
    """torch's own checkpoint."""
    return torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
