"""``checkpoint()``: torch's non-reentrant checkpoint, with its large inputs kept by discod."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

# torch's checkpoint imports this in its first call, and an exception caught on the way then holds
# that call's frames, and with them its inputs, until the next garbage collection.
import torch._dynamo
import torch.utils.checkpoint

from disco_client import connection
from disco_client.hooks import InputGuard, refuse_stale, version_of
from disco_client.residency import Group

_log = logging.getLogger(__name__)

_TORCH_OPTIONS = (
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "preserve_rng_state",
)

_group = Group()
"""The owner of all blobs of ``checkpoint()``: prefetched as far ahead as the arena allows."""

_warned_reentrant = False


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """Drop-in for :func:`torch.utils.checkpoint.checkpoint` that keeps the inputs off the heap.

    Runs ``function(*args, **kwargs)`` without keeping its activations, and runs it again in
    backward. Every plain tensor among ``args`` and the values of ``kwargs`` of at least
    ``min_bytes`` (1 MiB unless :func:`disco_client.connect` was told otherwise) is copied to the
    arena at once, and is not kept in memory by the graph. Parameters, small tensors, tensors
    inside containers and subclasses stay as they are. Equal inputs are stored once.

    Args:
        function: What to run; called exactly as torch's checkpoint calls it.
        args: Its positional arguments.
        use_reentrant: For compatibility; the non-reentrant form is always used.
        kwargs: Its keyword arguments, and torch's own options ``preserve_rng_state``,
            ``context_fn``, ``determinism_check``, ``debug`` and ``early_stop``.

    Returns:
        What ``function`` returns.

    Raises:
        UnsupportedCall: ``function`` changed an offloaded input in place, so its recomputation
            would start from other values than the ones torch would use.
        DiscodError: No daemon, or no room. In backward: the blob cannot be had.

    Example:
        >>> h = disco_client.checkpoint(layer, h, attention_mask=mask)  # doctest: +SKIP
    """
    if use_reentrant:
        _warn_reentrant()
    options = {name: kwargs.pop(name) for name in _TORCH_OPTIONS if name in kwargs}
    names = tuple(kwargs)
    run = function if not names else _with_keywords(function, len(args), names)
    inputs = (*args, *kwargs.values())
    plain: Callable[..., Any] = functools.partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=False, **options
    )
    if not torch.is_grad_enabled():
        return plain(run, *inputs)
    packer = connection.current().packer
    offloaded = [packer.offloads(value) for value in inputs]
    if not any(offloaded):
        return plain(run, *inputs)
    guard = InputGuard(inputs)
    with packer.hooks(_group):
        result = plain(*_by_reference(run, inputs, offloaded))
    guard.refuse_changes(packer, function)
    return result


class _Referenced:
    """A tensor that stays in memory, passed around the hooks as the very object it is.

    The hooks would take its Python type or attributes away. Changes in place are checked here, as
    autograd would check them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)

    def get(self) -> torch.Tensor:
        refuse_stale(self._tensor, self._version)
        return self._tensor


def _by_reference(
    run: Callable[..., Any], inputs: tuple[Any, ...], offloaded: list[bool]
) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    """``run`` and its inputs, with every tensor that is not offloaded passed by reference."""

    def call(*wrapped: Any) -> Any:
        return run(*(v.get() if isinstance(v, _Referenced) else v for v in wrapped))

    return call, *(
        _Referenced(value) if isinstance(value, torch.Tensor) and not goes else value
        for value, goes in zip(inputs, offloaded, strict=True)
    )


def _with_keywords(
    function: Callable[..., Any], positional: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    """``function`` with its keyword arguments taken by position, so that torch saves them too."""

    def call(*inputs: Any) -> Any:
        keywords = dict(zip(names, inputs[positional:], strict=True))
        return function(*inputs[:positional], **keywords)

    return call


def _warn_reentrant() -> None:
    global _warned_reentrant
    if not _warned_reentrant:
        _warned_reentrant = True
        _log.warning(
            "checkpoint(use_reentrant=True): discod always runs the non-reentrant form, which "
            "gives the same gradients"
        )
