"""``checkpoint()``: torch's non-reentrant checkpoint, with its large inputs kept by discod."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

# torch's checkpoint imports this in its first call, and an exception caught on the way then holds
# that call's frames, and with them its inputs, until the next garbage collection.
import torch._dynamo
import torch.utils.checkpoint

from disco_client import connection
from disco_client.compiling import runs_eagerly
from disco_client.hooks import recomputed_region, region_depth
from disco_client.prepared import Prepared
from disco_client.residency import Group
from disco_client.tally import tally

_log = logging.getLogger(__name__)

TORCH_OPTIONS = frozenset(inspect.signature(torch.utils.checkpoint.checkpoint).parameters) - {
    "function",
    "args",
    "kwargs",
    "use_reentrant",
} | {"preserve_rng_state"}
"""The keyword arguments that are torch's and not the function's."""

group = Group()
"""The owner of all blobs of ``checkpoint()``: prefetched as far ahead as the arena allows."""

_warned_reentrant = False


@runs_eagerly
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Drop-in for :func:`torch.utils.checkpoint.checkpoint` that keeps the inputs off the heap.

    Runs ``function(*args, **kwargs)`` without keeping its activations, and runs it again in
    backward. Every tensor of at least ``min_bytes`` (1 MiB unless :func:`disco_client.connect` was
    told otherwise) among the arguments, also in lists, tuples and dicts, is copied to the arena
    at once, and is not kept in memory by the graph. Parameters, buffers, small tensors and tensors
    without plain bytes stay as they are. Equal inputs are stored once. Inside the function of
    another call, which is recomputed as a whole, it is torch's checkpoint and stores nothing.

    Args:
        function: What to run; called exactly as torch's checkpoint calls it. Without it, the result
            is a decorator with these options: ``@checkpoint(use_reentrant=False)``.
        args: Its positional arguments.
        use_reentrant: For compatibility; the non-reentrant form is always used.
        kwargs: Its keyword arguments, and torch's own options ``preserve_rng_state``,
            ``context_fn``, ``determinism_check``, ``debug`` and ``early_stop``.

    Returns:
        What ``function`` returns.

    Raises:
        UnsupportedCall: ``function`` changed an offloaded input in place, so its recomputation
            would start from other values than the ones torch would use. Or a CUDA graph is being
            captured.
        BlobModified: In backward: an input on a GPU was changed in place after the call, before its
            copy had landed. (torch's checkpoint raises for any such change; on the CPU it is no
            error here.)
        DiscodError: No daemon, or no room. In backward: the blob cannot be had.

    Example:
        >>> h = disco_client.checkpoint(layer, h, attention_mask=mask)  # doctest: +SKIP
    """
    if use_reentrant:
        _warn_reentrant()
    if function is None:
        return functools.partial(_decorate, kwargs)
    options = {name: kwargs.pop(name) for name in TORCH_OPTIONS & kwargs.keys()}
    plain: Callable[..., Any] = functools.partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=False, **options
    )
    call = prepare(function, args, kwargs)
    if call is None:
        return plain(region(function), *args, **kwargs)
    with connection.current().packer.hooks(group):
        result = plain(call, *call.inputs)
    call.finish()
    return result


def _decorate(options: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **options, **kwargs)

    return call


def prepare(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Prepared | None:
    """The call, ready to be run under the packer's hooks; None when nothing is to be offloaded."""
    if not torch.is_grad_enabled() or region_depth():
        return None
    tally.calls += 1
    packer = connection.current().packer
    call = Prepared(function, args, kwargs, packer)
    given_tensors = any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
    if not given_tensors and isinstance(function, functools.partial):
        # Some models hand over their hidden states by keyword, and libraries put those in partials.
        given = (*function.args, *args)
        call = Prepared(function.func, given, {**function.keywords, **kwargs}, packer)
    return call if call.worthwhile else None


def region(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, marked as recomputed as a whole: calls inside of it store nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with recomputed_region():
            return function(*args, **kwargs)

    return call


def _warn_reentrant() -> None:
    global _warned_reentrant
    if not _warned_reentrant:
        _warned_reentrant = True
        _log.warning(
            "checkpoint(use_reentrant=True): discod always runs the non-reentrant form, whose "
            "gradients may differ in their last bits from the reentrant form's; pass False, or use "
            "disco_client.Disco or patch_torch() for the reentrant one"
        )
