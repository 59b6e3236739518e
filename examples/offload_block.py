"""A model that does not recompute: all that autograd saves goes to discod, and comes back.

Compares every gradient with that of the same step without discod.

python examples/offload_block.py
"""

import torch
from torch import Tensor, nn

import disco_client


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Those of ``loss``; the model has none afterwards."""
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def main() -> None:
    """One step with discod, one without."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
    batch = torch.randn(1024, 256)

    plain = gradients(model, model(batch).square().mean())

    with disco_client.offload():
        loss = model(batch).square().mean()
    offloaded = gradients(model, loss)  # backward may be outside of the block

    counters = disco_client.stats()
    saved, written = counters.saved_bytes >> 20, counters.written_bytes >> 20
    print(f"saved {counters.saved_blobs} tensors, {saved} MiB, of which {written} MiB were written")
    print("gradients equal:", all(map(torch.equal, plain, offloaded)))


if __name__ == "__main__":
    main()
