"""A small byte-level GPT, and its text: the sources of Python's own standard library.

Attention is factorised so that long sequences stay cheap on a CPU: even layers attend within
blocks of neighbouring bytes, odd layers across the blocks at the same place in each (the "fixed"
pattern of Child et al., "Generating Long Sequences with Sparse Transformers", 2019). The width is
small and the sequence long, so that there is much activation per unit of compute, as there is on
an accelerator.
"""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
HEAD_WIDTH = 64
BLOCK = 64
"""Bytes of text in a block: the square root of the longest sequence, so both axes cost the same."""

Checkpoint = Callable[[nn.Module, Tensor], Tensor]
"""Calls a layer on its input so that only the input is kept until backward."""


class Attention(nn.Module):
    """Causal attention along one of the two axes of ``(block, place in block)``."""

    def __init__(self, width: int, across_blocks: bool) -> None:
        super().__init__()
        self.across_blocks = across_blocks
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        grid = self.qkv(hidden).view(batch, length // BLOCK, BLOCK, 3, -1, HEAD_WIDTH)
        if self.across_blocks:
            grid = grid.transpose(1, 2)
        query, key, value = grid.transpose(2, 4).unbind(3)
        mixed = functional.scaled_dot_product_attention(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), is_causal=True
        )
        mixed = mixed.view(query.shape).transpose(2, 3)
        if self.across_blocks:
            mixed = mixed.transpose(1, 2)
        return self.out(mixed.reshape(batch, length, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm transformer layer with dropout, so that the random state matters too."""

    def __init__(self, width: int, across_blocks: bool, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, across_blocks)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes in, mean loss of predicting each next byte out."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        length: int,
        checkpoint: Checkpoint,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            Layer(width, across_blocks=bool(i % 2), dropout=dropout) for i in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        hidden = self.bytes(inputs) + self.places.weight[: inputs.shape[1]]
        for layer in self.layers:
            hidden = self.checkpoint(layer, hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library_text() -> Tensor:
    """All top-level modules of the standard library, in order of name, as bytes (uint8).

    Raises:
        FileNotFoundError: This Python has no sources beside it.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_bytes() for path in sorted(directory.glob("*.py"))]
    if not sources:
        raise FileNotFoundError(f"no *.py in {directory}: this Python came without its sources")
    return torch.frombuffer(bytearray(b"".join(sources)), dtype=torch.uint8)


def batch(text: Tensor, *, seed: int, rows: int, length: int) -> Tensor:
    """``rows`` random pieces of ``text``, of ``length + 1`` bytes; the same for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (rows,), generator=generator)
    return torch.stack([text[i : i + length + 1] for i in starts.tolist()]).long()
