"""TRL: its ``activation_offloading=True`` goes to discod.

What is replaced is the class of TRL's context, not the function that makes it: many trainers have
imported that function, and it also keeps the output head out of the offloading, which stays so.
"""

from typing import Any

import torch
from trl.models import activation_offloading

from disco_client.buffers import remember
from disco_client.offload import offload
from disco_client.patches.replacing import Patch, Replacement


def enable() -> None:
    """Send what TRL's ``activation_offloading`` offloads to discod, for trainers made from now on.

    Raises:
        UsageError: This version of TRL is built differently.
    """
    _patch.enable()


def disable() -> None:
    """Put TRL's own offloading back, for trainers made from now on."""
    _patch.disable()


class DiskActivations(offload):
    """:class:`disco_client.offload` as TRL makes and uses its own context.

    Args:
        settings: TRL's, for streams and pinned memory, which do not apply. The least size is that
            of :func:`disco_client.connect`: TRL's 1 KiB is not worth a trip to a disk.
    """

    def __init__(self, *settings: Any, **more: Any) -> None:
        super().__init__()

    def update_model_params(self, model: torch.nn.Module) -> None:
        """Called once, with the trainer's model."""
        remember(model)


def _replacements() -> list[Replacement]:
    return [Replacement(activation_offloading, "OffloadActivations", lambda _: DiskActivations)]


_patch = Patch("trl", _replacements, "Is activation_offloading=True in the trainer's config?")
