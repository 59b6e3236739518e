"""A training step of 6 MiB of hidden states that takes a moment, and all its bits as hashes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

import disco_client
from tests.helpers.models import plain_checkpoint
from tests.helpers.training import fingerprint

LAYERS = 24
WIDTH = 256
HIDDEN_BYTES = 4 * WIDTH * WIDTH

SETTINGS = {"arena": "2MiB", "min_bytes": "64KiB"}
"""Of an attachment over which most of the hidden states go to disk."""


def step(
    seed: int,
    form: Callable[..., Any] = disco_client.checkpoint,
    after_forward: Callable[[], object] = lambda: None,
) -> list[str]:
    """Loss, gradients and random state of a forward and backward with ``form``."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(LAYERS)]
    hidden = torch.randn(WIDTH, WIDTH, requires_grad=True)
    last = hidden
    for layer in layers:
        last = torch.tanh(form(layer, last))
    loss = last.square().sum()
    after_forward()
    loss.backward()
    gradients = [hidden.grad, *(p.grad for layer in layers for p in layer.parameters())]
    return [fingerprint(t) for t in (loss, *gradients, torch.get_rng_state()) if t is not None]


@cache
def expected(seed: int) -> list[str]:
    """What :func:`step` gives without discod."""
    return step(seed, plain_checkpoint)
