"""torch: every call of ``torch.utils.checkpoint.checkpoint`` in the process goes to discod.

What is replaced are the two implementations that torch's function chooses from, not the function:
so it does not matter who imported it, when, or in which partial it stands. Each form keeps its own
semantics, the reentrant one too; only its inputs are kept elsewhere.
"""

import inspect
from collections.abc import Callable, Generator
from typing import Any

import torch.utils.checkpoint

from disco_client import connection
from disco_client.checkpoint import group, prepare, region
from disco_client.function import offload_reentrant
from disco_client.hooks import recomputed_region
from disco_client.patches.replacing import Patch, Replacement
from disco_client.prepared import Prepared


def enable() -> None:
    """Send all activation checkpoints of this process to discod, models made before included.

    Under ``torch.compile``, torch replaces checkpoints inside of a compiled region by its own;
    those are not seen here.

    Raises:
        UsageError: This version of torch is built differently.
    """
    patch.enable()


def disable() -> None:
    """Put torch's own implementation back, for models made in the meantime too."""
    patch.disable()


def _replacements() -> list[Replacement]:
    module = torch.utils.checkpoint
    return [
        Replacement(module, "_checkpoint_without_reentrant_generator", _offload_generator),
        Replacement(module, "CheckpointFunction", _offload_function),
    ]


_Generator = Callable[..., Generator[None, None, None]]


def _offload_generator(original: _Generator) -> _Generator:
    """torch runs ``function`` itself at the yield; what is passed on is for the recomputation."""
    kinds = [p.kind for p in inspect.signature(original).parameters.values()]
    options = kinds.index(inspect.Parameter.VAR_POSITIONAL) - 1  # all but the function

    def generate(
        function: Callable[..., Any], *rest: Any, **kwargs: Any
    ) -> Generator[None, None, None]:
        if isinstance(function, Prepared):  # by disco_client.checkpoint, which has done all this
            yield from original(function, *rest, **kwargs)
            return
        call = prepare(function, rest[options:], kwargs)
        if call is None:
            with recomputed_region():
                yield from original(region(function), *rest, **kwargs)
            return
        call.run_by_torch()
        with connection.current().packer.hooks(group), recomputed_region():
            yield from original(call, *rest[:options], *call.inputs)
        call.finish()

    return generate


def _offload_function(original: type[Any]) -> type[Any]:
    class OffloadedCheckpointFunction(original):  # type: ignore[misc]  # torch's class, untyped
        """torch's reentrant checkpoint, whose saved inputs discod keeps."""

        @classmethod
        def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            """As ``CheckpointFunction.apply``."""

            def apply(run: Callable[..., Any], *inputs: Any) -> Any:
                return original.apply(run, preserve, *inputs)

            if not torch.is_grad_enabled():
                return apply(function, *args)
            return offload_reentrant(apply, function, args, group)

    return OffloadedCheckpointFunction


patch = Patch(
    "torch",
    _replacements,
    "Does the model call torch.utils.checkpoint.checkpoint (is its gradient checkpointing on), "
    "outside of torch.compile?",
)
