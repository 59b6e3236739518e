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
    names = ["_checkpoint_without_reentrant_generator_impl"]  # since torch 2.14
    if not hasattr(module, names[0]):
        names = ["_checkpoint_without_reentrant_generator"]
    return [
        Replacement(module, names[0], _offload_generator),
        Replacement(module, "CheckpointFunction", _offload_function),
    ]


_Steps = Generator[None, None, None]


def _offload_generator(original: Callable[..., _Steps]) -> Callable[..., _Steps]:
    """torch runs ``function`` itself at the yield; what is passed on is for the recomputation."""
    kinds = [p.kind for p in inspect.signature(original).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:  # (fn, args, kwargs, *, options)

        def generate(
            function: Callable[..., Any], args: Any, kwargs: Any, **options: Any
        ) -> _Steps:
            def start(run: Callable[..., Any], args: Any, kwargs: Any) -> _Steps:
                return original(run, tuple(args), kwargs, **options)

            yield from _offloaded(start, function, tuple(args), kwargs)

        return generate
    count = kinds.index(inspect.Parameter.VAR_POSITIONAL) - 1  # (fn, options..., *args, **kwargs)

    def generate_before(function: Callable[..., Any], *rest: Any, **kwargs: Any) -> _Steps:
        def start(run: Callable[..., Any], args: Any, kwargs: Any) -> _Steps:
            return original(run, *rest[:count], *args, **kwargs)

        yield from _offloaded(start, function, rest[count:], kwargs)

    return generate_before


def _offloaded(
    start: Callable[..., _Steps],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Steps:
    """torch's steps, with what they save kept by discod."""
    if isinstance(function, _Probe):
        function.seen = True
    if isinstance(function, _Probe | Prepared):  # the latter by disco_client.checkpoint
        yield from start(function, args, kwargs)
        return
    call = prepare(function, args, kwargs)
    if call is None:
        with recomputed_region():
            yield from start(region(function), args, kwargs)
        return
    call.run_by_torch()
    with connection.current().packer.hooks(group), recomputed_region():
        yield from start(call, call.inputs, {})
    call.finish()


def _offload_function(original: type[Any]) -> type[Any]:
    class OffloadedCheckpointFunction(original):  # type: ignore[misc]  # torch's class, untyped
        """torch's reentrant checkpoint, whose saved inputs discod keeps."""

        @classmethod
        def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            """As ``CheckpointFunction.apply``."""

            def apply(run: Callable[..., Any], *inputs: Any) -> Any:
                return original.apply(run, preserve, *inputs)

            if isinstance(function, _Probe):
                function.seen = True
                return apply(function, *args)
            if not torch.is_grad_enabled():
                return apply(function, *args)
            return offload_reentrant(apply, function, args, group)

    return OffloadedCheckpointFunction


OffloadedCheckpointFunction = _offload_function(torch.utils.checkpoint.CheckpointFunction)
"""For an adapter that sends the reentrant form of one model to discod, without this patch."""


class _Probe:
    """A function that shows whether a checkpointed call comes through here."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value * 1


def _arrives() -> bool:
    """Whether both forms of torch's checkpoint come through here: a name can be an old one."""
    for use_reentrant in (False, True):
        probe = _Probe()
        with torch.enable_grad():
            value = torch.ones(1, requires_grad=True)
            torch.utils.checkpoint.checkpoint(probe, value, use_reentrant=use_reentrant)
        if not probe.seen:
            return False
    return True


patch = Patch(
    "torch",
    _replacements,
    "Does the model call torch.utils.checkpoint.checkpoint (is its gradient checkpointing on), "
    "outside of torch.compile?",
    works=_arrives,
)
