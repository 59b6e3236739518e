"""A training loop of plain PyTorch: the input of each layer goes to discod.

python examples/plain_loop.py
"""

import torch
from torch import Tensor, nn

import disco_client

LAYERS, WIDTH, TOKENS, STEPS = 8, 128, 2048, 3


class Block(nn.Module):
    """A residual MLP, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        update: Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.norm(hidden)))))
        return hidden + update


def main() -> None:
    """Train, and say what went to disk."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    for step in range(STEPS):
        hidden = torch.randn(TOKENS, WIDTH)
        for block in blocks:
            hidden = disco_client.checkpoint(block, hidden)  # was: torch.utils.checkpoint's
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counters = disco_client.stats().last_cycle
        saved, written = counters.saved_bytes >> 20, counters.written_bytes >> 20
        print(f"step {step}: loss {loss.item():.3f}, saved {saved} MiB, written {written} MiB")


if __name__ == "__main__":
    main()
