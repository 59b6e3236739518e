"""accelerate: ``activation_checkpointing_offload`` of its FSDP plugin goes to discod, not to RAM.

Accelerate puts torch's ``OffloadWrapper`` around each checkpointed layer, and that is what is
replaced, so models that were prepared before are included. The plugin's plain
``activation_checkpointing`` keeps its meaning here, and its inputs in memory; to have those too,
and Accelerate without FSDP, use ``patches.torch``.
"""

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

from disco_client.offload import offload
from disco_client.patches.replacing import Patch, Replacement


def enable() -> None:
    """Send what ``OffloadWrapper`` offloads in this process to discod.

    Raises:
        UsageError: This version of torch is built differently.
    """
    _patch.enable()


def disable() -> None:
    """Put torch's own implementation back."""
    _patch.disable()


def _offload_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with offload():
            return self._checkpoint_wrapped_module(*args, **kwargs)

    return forward


_patch = Patch(
    "accelerate",
    lambda: [Replacement(OffloadWrapper, "forward", _offload_forward)],
    "Is activation_checkpointing_offload set in the FSDP plugin (fsdp_version=2), and is the model "
    "prepared with it? Without FSDP, call disco_client.patch_torch().",
)
