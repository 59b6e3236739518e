"""transformers: ``offload="disk"`` beside its own ``offload=True``, and a callback for ``Trainer``.

Two ways to the same end. The key is for one model, and stands in the configuration of a run. The
callback is for what cannot be reached by the key: code that calls torch's checkpoint itself.
"""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from transformers import PreTrainedModel, TrainerCallback

from disco_client.checkpoint import TORCH_OPTIONS, checkpoint
from disco_client.errors import UsageError
from disco_client.patches import torch as torch_patch
from disco_client.patches.replacing import Patch, Replacement

DISK = "disk"
"""The value of ``offload`` that stands for discod."""

_KEYS = ("offload", "every_n_layers")
"""What transformers itself reads of the options; all else is torch's."""


def enable() -> None:
    """Let ``offload="disk"`` among the checkpointing options send a model's layer inputs to discod.

    ``True`` and ``False`` mean what they did. A model whose checkpointing was turned on in this way
    keeps it, also after :func:`disable`, until its checkpointing is turned off or on anew.

    Raises:
        UsageError: This version of transformers is built differently.
    """
    _patch.enable()


def disable() -> None:
    """Put transformers' own method back."""
    _patch.disable()


class DiscodCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked
    """``Trainer(callbacks=[DiscodCallback()])``: its checkpoints go to discod while it trains.

    Turns :mod:`disco_client.patches.torch` on when training begins and off when it ends, and says
    after the first step if that moved nothing. Nothing of the model is touched, so it does not
    matter how the model was wrapped, which function it holds, or whether its checkpoints are
    reentrant. The patch stays on for good when it was on before, and until the end of the next
    training when this one raises.
    """

    _turned_on: ClassVar[bool] = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer before its first step."""
        if not torch_patch.patch.enabled:
            torch_patch.patch.enable(
                "Is activation_checkpointing=True (before transformers 5: gradient_checkpointing) "
                "among the TrainingArguments, and torch_compile off?"
            )
            DiscodCallback._turned_on = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after each step; optimizers that are not torch's have told nothing before."""
        torch_patch.patch.check()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after its last step."""
        if DiscodCallback._turned_on:
            DiscodCallback._turned_on = False
            torch_patch.patch.disable()


def _replacements() -> list[Replacement]:
    """The one method that every way of turning checkpointing on comes through."""
    name = "_activation_checkpointing_enable"
    if not hasattr(PreTrainedModel, name):  # before transformers 5
        name = "gradient_checkpointing_enable"
    return [Replacement(PreTrainedModel, name, _with_disk)]


def _with_disk(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)
    model_name, options_name, *own = signature.parameters

    @functools.wraps(original)
    def enable_checkpointing(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        options = dict(given.get(options_name) or {})
        # Trainer takes its keys out of the options; who passes them on as they are (TRL, when it
        # turns checkpointing back on after a reference model's turn) means the same.
        for key in _KEYS:
            if key in options and (key in own or options[key] == DISK):
                given[key] = options.pop(key)
        to_disk = _is_disk(given.get("offload", options.get("offload", False)))
        _refuse_unknown(options)
        if to_disk:
            del given["offload"]
        if options != given.get(options_name):
            given[options_name] = options or None
        original(*call.args, **call.kwargs)
        if to_disk:
            _rebind(given[model_name])

    return enable_checkpointing


def _is_disk(offload: object) -> bool:
    if isinstance(offload, str) and offload != DISK:
        raise ValueError(
            f'offload={offload!r} is not known: "{DISK}" keeps layer inputs with discod, True in '
            "host memory, False where they are"
        )
    return offload == DISK


def _refuse_unknown(options: dict[str, Any]) -> None:
    """Layers that take any keyword would swallow one that torch does not know, without effect."""
    for key in options.keys() - TORCH_OPTIONS:
        for meant in difflib.get_close_matches(key, _KEYS, n=1):
            if key == meant:
                raise ValueError(f"{key}={options[key]!r} is not known to this transformers")
            raise ValueError(
                f"{key!r} is no option of activation checkpointing; did you mean {meant!r}?"
            )


def _rebind(model: Any) -> None:
    """Another function in the place of torch's, with the keywords that transformers chose."""
    modules = [module for module in model.modules() if _HELD in vars(module)]
    if not modules:
        raise UsageError(
            f"{type(model).__name__} calls torch's checkpoint itself, so that "
            f'offload="{DISK}" cannot reach it; use DiscodCallback() or disco_client.patch_torch()'
        )
    for module in modules:
        keywords = getattr(vars(module)[_HELD], "keywords", {})
        form = _reentrant if keywords.get("use_reentrant") else checkpoint
        setattr(module, _HELD, functools.partial(form, **keywords))


def _reentrant(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    preserve_rng_state: bool = True,
) -> Any:
    """torch's reentrant form, whose gradients differ in their last bits from the other one's."""
    return torch_patch.OffloadedCheckpointFunction.apply(function, preserve_rng_state, *args)


_HELD = "_gradient_checkpointing_func"
"""Where a module of transformers keeps the function that checkpoints its layers."""

_patch = Patch(
    "transformers",
    _replacements,
    'Is activation_checkpointing=True and activation_checkpointing_kwargs={"offload": "disk"} '
    "among the TrainingArguments (before transformers 5: gradient_checkpointing_kwargs), or was "
    "it turned on before this patch?",
)
