"""A training script that knows nothing of discod, for the runner: ``plain_script.py --out FILE``.

Writes the gradients of two steps to FILE, with the rank after its name. ``--scratch`` and
``--arena`` are its own options, named as the runner's to see that nobody else takes them.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LAYERS = 4
STEPS = 2


class Model(nn.Module):
    """Residual layers with dropout; the input of each has 1 MiB."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute:
                hidden = hidden + checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = hidden + layer(hidden)
        return hidden


def train(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> list[torch.Tensor]:
    """Train for STEPS steps: the gradients of each."""
    gradients = []
    for _ in range(STEPS):
        backward(model(torch.randn(1024, 256)).square().mean())
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the gradients."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--scratch", default="")
    parser.add_argument("--arena", default="")
    parser.add_argument("--no-recompute", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Model(not options.no_recompute)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    torch.manual_seed(rank)
    gradients = train(model, optimizer)
    torch.save(gradients, f"{options.out}{rank}")
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
