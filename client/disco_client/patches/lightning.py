"""lightning: a callback that offloads for the time of ``fit``, and leaves no trace after it.

``lightning`` and ``pytorch_lightning`` are two trees of the same classes: the callback belongs to
those that are imported when this module is, else to the one that is installed.
"""

import importlib
import importlib.util
import os
import sys
from typing import Any, Literal

from disco_client.errors import UsageError
from disco_client.offload import offload
from disco_client.patches.replacing import Patch, Replacement
from disco_client.patches.torch import patch as torch_patch

_TREES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type[Any], ...]:
    imported = [tree for tree in _TREES if tree in sys.modules]
    if not imported:
        imported = [tree for tree in _TREES if importlib.util.find_spec(tree.partition(".")[0])]
        del imported[1:]
    if not imported:
        raise ImportError("neither lightning nor pytorch_lightning is installed")
    return tuple(importlib.import_module(tree).Callback for tree in imported)


class DiscodCallback(*_callback_classes()):  # type: ignore[misc]  # whichever tree is in use
    """Sends activations to discod from the start of ``trainer.fit`` to its end, however it ends.

    The state of the trainer and of the model are as without it. When nothing was offloaded by the
    end of the first backward, one warning says why.

    Args:
        saved: ``"inputs"``: those of ``torch.utils.checkpoint``, called by the model or put around
            its layers by a strategy's ``activation_checkpointing_policy``. ``"all"``: everything
            that autograd saves in ``training_step``, for models that do not recompute.

    Raises:
        UsageError: ``saved`` is something else.

    Example:
        >>> trainer = Trainer(callbacks=[DiscodCallback()])  # doctest: +SKIP
    """

    def __init__(self, saved: Literal["inputs", "all"] = "inputs") -> None:
        super().__init__()
        if saved not in ("inputs", "all"):
            raise UsageError(f'saved={saved!r} is neither "inputs" nor "all"')
        self._saved = saved
        self._patch: Patch | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Enable, unless the script has done so for itself."""
        # Lightning's own launchers leave it out, and each rank would take the whole node's RAM.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(trainer.num_devices))
        patch = torch_patch if self._saved == "inputs" else _of_training_step(trainer, pl_module)
        if not patch.enabled:
            patch.enable()
            self._patch = patch

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Prove that something was offloaded."""
        if self._patch is not None:
            self._patch.check()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Disable."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Disable: ``fit`` ends here."""
        self._end()

    def _end(self) -> None:
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.disable()


def _of_training_step(trainer: Any, module: Any) -> Patch:
    """On the trainer's strategy, which is neither saved nor copied, as the module may be."""
    return Patch(
        "lightning",
        lambda: [Replacement(trainer.strategy, "training_step", offload(module))],
        "Does training_step compute the loss with gradients?",
    )
