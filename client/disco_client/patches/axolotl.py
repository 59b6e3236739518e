"""axolotl: ``activation_offloading: disk`` goes to discod.

In Axolotl 0.19 that value is accepted, and then offloads to CPU memory: what chooses Axolotl's own
``Disco`` compares it with ``offload_disk``. Here, the layers' inputs go to discod where the layers
recompute (full fine-tuning), and everything that autograd saves where they do not (LoRA). The other
values keep their meaning. Trainers for ``rl`` use TRL's offloader instead, and are not touched.
"""

import contextlib
import functools
import importlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from disco_client.function import Disco
from disco_client.offload import offload
from disco_client.patches.replacing import Patch, Replacement

_BasePlugin: Any = importlib.import_module("axolotl.integrations.base").BasePlugin

_log = logging.getLogger(__name__)

_boundaries: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The recomputed layers of models that are trained with ``disk``."""


def enable() -> None:
    """Change what ``disk`` means for trainers that are made from now on.

    Axolotl's ``Disco`` and ``hf_grad_checkpoint_disk_offload_wrapper`` become discod's, too.

    Raises:
        UsageError: This version of Axolotl is built differently.
    """
    _patch.enable()


def disable() -> None:
    """Put Axolotl's own code back. A LoRA trainer that was made in between goes on offloading."""
    _patch.disable()


class DiscodPlugin(_BasePlugin):  # type: ignore[misc]  # Axolotl's class, which has no types
    """``plugins: [disco_client.patches.axolotl.DiscodPlugin]``: all that the YAML needs."""

    def pre_model_load(self, cfg: Any) -> None:
        """Enable, if the configuration says ``disk``."""
        if cfg.activation_offloading == "disk":
            enable()
        else:
            _log.warning(
                "DiscodPlugin is loaded, but activation_offloading is %r, so discod is not used; "
                "set gradient_checkpointing: true and activation_offloading: disk",
                cfg.activation_offloading,
            )

    def post_train(self, cfg: Any, model: Any) -> None:
        """Disable."""
        disable()


def _offload_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        candidates = (*args, *kwargs.values())
        settings = next((c for c in candidates if hasattr(c, "activation_offloading")), None)
        if settings is None or settings.activation_offloading != "disk":
            original(self, *args, **kwargs)
            return
        settings.activation_offloading = False  # else Axolotl makes TRL's offloader
        try:
            original(self, *args, **kwargs)
        finally:
            settings.activation_offloading = "disk"
        self.activation_offload_context = _context(self.model)

    return init


def _context(model: nn.Module) -> Any:
    """What ``training_step`` runs in."""
    recomputed = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    _boundaries.update(recomputed)
    return contextlib.nullcontext() if recomputed else offload(model)


def _offload_boundary(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with offload() if self in _boundaries else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return forward


def _offload_layer(_: Callable[..., Any]) -> Callable[..., Any]:
    """Axolotl's own looks for the layer inside of the callable, and finds none in newer ones."""

    def checkpoint(layer: Callable[..., Any], *args: Any, use_reentrant: bool | None = None) -> Any:
        return Disco.apply(layer, *args)

    return checkpoint


def _replacements() -> list[Replacement]:
    checkpointing = importlib.import_module("axolotl.monkeypatch.gradient_checkpointing")
    mixin = importlib.import_module("axolotl.core.trainers.mixins.activation_checkpointing")
    return [
        Replacement(checkpointing, "Disco", lambda _: Disco),
        Replacement(checkpointing, "hf_grad_checkpoint_disk_offload_wrapper", _offload_layer),
        Replacement(mixin.ActivationOffloadingMixin, "__init__", _offload_init),
        Replacement(CheckpointWrapper, "forward", _offload_boundary),
    ]


_patch = Patch(
    "axolotl",
    _replacements,
    "Is activation_offloading: disk, and the trainer not one for rl (those use TRL's offloader)?",
)
