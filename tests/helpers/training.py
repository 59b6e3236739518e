"""Seeded training steps, reduced to fingerprints that are equal only when every bit is."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional


def fingerprint(tensor: torch.Tensor) -> str:
    """A hash of the tensor's bytes."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(memoryview(data.numpy()), digest_size=8).hexdigest()


def train(
    model: nn.Module,
    *,
    steps: int = 3,
    batch: int = 4,
    length: int = 512,
    autocast: bool = False,
    seed: int = 0,
    after_forward: Callable[[int], object] = lambda step: None,
) -> list[dict[str, Any]]:
    """Train and return, per step: fingerprints of output, every gradient, and the RNG state.

    ``after_forward(step)`` runs between forward and backward, which is where faults are made.
    """
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(steps):
        tokens = torch.randint(0, 256, (batch, length + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        after_forward(step)
        loss.backward()
        history.append(
            {
                "loss": loss.item(),
                "output": fingerprint(logits),
                "grads": {
                    name: None if p.grad is None else fingerprint(p.grad)
                    for name, p in model.named_parameters()
                },
                "rng": fingerprint(torch.get_rng_state()),
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        del logits, loss
    return history
