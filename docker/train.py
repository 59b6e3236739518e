"""A trainer to try an installation with: each step with discod and without, compared.

``python train.py [STEPS]``, or under torchrun with any number of nodes and ranks. Each rank prints a line
for each step, and ends with an error when a gradient is not equal to that of plain checkpointing.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint

import disco_client

WIDTH = 512
TOKENS = 2048
LAYERS = 8


class Model(nn.Module):
    """Some layers, of which each one's input, 4 MiB, is kept until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor, offload: bool) -> torch.Tensor:
        for layer in self.layers:
            if offload:
                hidden = torch.tanh(disco_client.checkpoint(layer, hidden))
            else:
                hidden = torch.tanh(plain_checkpoint(layer, hidden, use_reentrant=False))
        return hidden


def gradients(model: nn.Module, hidden: torch.Tensor, *, offload: bool) -> list[torch.Tensor]:
    """Of one forward and backward; in a job the means over all ranks."""
    model.zero_grad()
    model(hidden, offload).square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def main() -> None:
    """Train for some steps."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)  # the same model on all ranks, and then to each its own data
    model: nn.Module = Model()
    torch.manual_seed(1 + rank)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    for step in range(steps):
        hidden = torch.randn(TOKENS, WIDTH)
        plain = gradients(model, hidden, offload=False)
        offloaded = gradients(model, hidden, offload=True)
        if len(plain) != 2 * LAYERS or not all(map(torch.equal, plain, offloaded)):
            sys.exit(f"rank {rank} step {step}: the gradients differ from plain checkpointing's")
        norm = torch.cat([gradient.flatten() for gradient in plain]).norm()
        written_mib = disco_client.stats().written_bytes >> 20
        print(f"rank {rank} step {step}: gradients equal, norm {norm:.9f}, {written_mib} MiB written")
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
