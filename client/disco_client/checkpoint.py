"""``checkpoint()``: torch's non-reentrant checkpoint, with its large inputs kept by discod."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from disco_client import connection
from disco_client.hooks import InputGuard
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
    if not torch.is_grad_enabled():
        return torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False, **options)
    guard = InputGuard(inputs)
    packer = connection.current().packer
    with packer.hooks(_group):
        result = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False, **options)
    guard.refuse_changes(packer, function)
    return result


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
