"""The ways to checkpoint a layer that the training benchmark compares."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import disco_client
from disco_client.arena import Arena
from tests.benchmarks import axolotl_disco
from tests.benchmarks.workloads import Checkpoint

PLAIN = "checkpoint"
REENTRANT = "reentrant"
DISCOD = "discod checkpoint()"
DISCOD_DISCO = "discod Disco"
SAVE_ON_CPU = "save_on_cpu"
AXOLOTL = "Axolotl Disco"
COPIES = "checkpoint + copies"
"""Control: plain checkpointing that copies each input into warm memory of an arena's kind, too."""
FITS = "discod checkpoint(), all fits"
"""Control: all that discod does but for the disk's part."""

REFERENCE = {
    PLAIN: PLAIN,
    SAVE_ON_CPU: PLAIN,
    DISCOD: PLAIN,
    REENTRANT: REENTRANT,
    DISCOD_DISCO: REENTRANT,
    AXOLOTL: REENTRANT,
    COPIES: PLAIN,
    FITS: PLAIN,
}
"""Each system's own kind of plain checkpointing, which its time and gradients are held against."""

WITH_ARENA = (DISCOD, DISCOD_DISCO)
ATTACHED = (*WITH_ARENA, FITS)


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a system keeps what it does not keep in its own memory."""

    arena_bytes: int = 0
    socket_dir: str = ""
    min_bytes: int = 0
    folder: str = ""
    """For Axolotl's files."""
    hidden_bytes: int = 0
    """Of each layer's input."""


def open_system(system: str, attachment: Attachment) -> Checkpoint:
    """Attach what ``system`` needs; how it calls a layer."""
    if system == COPIES:
        return _Copies(attachment)
    if system in ATTACHED:
        disco_client.connect(
            attachment.socket_dir,
            arena=attachment.arena_bytes,
            min_bytes=attachment.min_bytes,
        )
    if system == AXOLOTL:
        module = axolotl_disco.load(axolotl_disco.find(), Path(attachment.folder))
        return module.Disco.apply  # type: ignore[no-any-return]
    calls: dict[str, Checkpoint] = {
        PLAIN: _plain,
        REENTRANT: _reentrant,
        SAVE_ON_CPU: _save_on_cpu,
        DISCOD: disco_client.checkpoint,
        FITS: disco_client.checkpoint,
        DISCOD_DISCO: disco_client.Disco.apply,
    }
    return calls[system]


def _plain(layer: nn.Module, hidden: Tensor) -> Tensor:
    result: Tensor = checkpoint(layer, hidden, use_reentrant=False)
    return result


def _reentrant(layer: nn.Module, hidden: Tensor) -> Tensor:
    result: Tensor = checkpoint(layer, hidden, use_reentrant=True)
    return result


def _save_on_cpu(layer: nn.Module, hidden: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return _plain(layer, hidden)


class _Copies:
    """Each input goes to the next place of an arena that has room for all."""

    def __init__(self, attachment: Attachment) -> None:
        arena = Arena(attachment.arena_bytes)
        arena.back(attachment.arena_bytes)
        self._places = torch.frombuffer(arena.view, dtype=torch.uint8).split(
            attachment.hidden_bytes
        )
        self._calls = 0

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        place = self._places[self._calls % len(self._places)]
        self._calls += 1
        with torch.no_grad():
            place.copy_(hidden.detach().flatten().view(torch.uint8))
        return _plain(layer, hidden)
