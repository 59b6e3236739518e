"""A trainer to try an installation with: each step with discod and without, compared.

``python train.py [STEPS]``, or under torchrun with any number of nodes and ranks. Each rank prints
a line for each step, and ends with an error when a gradient is not equal to that of plain
checkpointing.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint

import disco_client

WIDTH = 256
TOKENS = 1024
LAYERS = 8


class Model(nn.Module):
    """Some layers, of which each one's input, 1 MiB, is kept until backward."""

    def __init__(self, *, offload: bool) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on all ranks, and with and without discod
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)
        )
        self.offload = offload

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.offload:
                hidden = disco_client.checkpoint(layer, hidden)
            else:
                hidden = plain_checkpoint(layer, hidden, use_reentrant=False)
        return hidden


def gradients(model: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Of one forward and backward; in a job the means over all ranks."""
    model.zero_grad()
    model(hidden).square().mean().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def train(steps: int, rank: int) -> None:
    """Train both models for some steps, and end the process when they differ."""
    models: list[nn.Module] = [Model(offload=False), Model(offload=True)]
    if torch.distributed.is_initialized():
        models = [nn.parallel.DistributedDataParallel(model) for model in models]
    torch.manual_seed(1 + rank)  # to each rank its own data
    for step in range(steps):
        hidden = torch.randn(TOKENS, WIDTH)
        plain, offloaded = (gradients(model, hidden) for model in models)
        if len(plain) != 2 * LAYERS or not all(map(torch.equal, plain, offloaded)):
            sys.exit(f"rank {rank} step {step}: the gradients differ from plain checkpointing's")
        norm = torch.cat([gradient.flatten() for gradient in plain]).norm()
        written = disco_client.stats().written_bytes >> 20
        print(f"rank {rank} step {step}: gradients equal, norm {norm:.9f}, {written} MiB written")


def main() -> None:
    """Train, alone or as a rank of a job."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    train(steps, int(os.environ.get("RANK", "0")))
    # With the models gone: if they were the last to hold the group, its end would wait for threads
    # that wait for the interpreter (pytorch/pytorch#56297).
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
