"""Data parallel training: each rank has an arena of its own, all share the machine's daemon.

torchrun --standalone --nproc-per-node=2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import disco_client

LAYERS, WIDTH, TOKENS, STEPS = 8, 256, 1024, 3


class Model(nn.Module):
    """Residual layers, each of which is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + disco_client.checkpoint(layer, hidden)
        return hidden


def main() -> None:
    """Train, and have each rank say what it moved."""
    dist.init_process_group("gloo")  # on GPUs: "nccl", and a device for each rank (docs/gpu.md)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(TOKENS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    counters = disco_client.stats().last_cycle
    saved, written = counters.saved_bytes >> 20, counters.written_bytes >> 20
    print(f"rank {dist.get_rank()}: saved {saved} MiB, written {written} MiB a step\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
