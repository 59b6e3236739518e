"""``offload()``: every saved activation of a block kept by discod, without any recomputation."""

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from disco_client import connection
from disco_client.buffers import remember
from disco_client.compiling import runs_eagerly
from disco_client.errors import UnsupportedCall, UsageError
from disco_client.hooks import unpack
from disco_client.inplace import name_of
from disco_client.packed import Kept
from disco_client.residency import Group
from disco_client.tally import tally
from discod.wire.sizes import parse_size

_F = TypeVar("_F", bound=Callable[..., Any])

_group = Group()
"""The owner of all blobs of ``offload()``."""

_FUNC_REFUSAL = "don't yet support saved tensor hooks"


class offload:
    """A block, or a decorated function, whose saved activations discod keeps.

    Every tensor of at least ``min_bytes`` that autograd saves inside is copied to the arena and
    not kept in memory by the graph; backward loads it back, inside the block or outside. Bytes that
    several operations save are stored once, whatever view each has of them. A tensor subclass
    around plain tensors (DTensor, quantized weights) is stored by its parts. Values are those at
    the time of the save. A later change in place is no error on the CPU; on a GPU it may come
    before the copy has landed, and then the load raises ``BlobModified``. torch takes the Python
    attributes of saved tensors away under any hooks (``weight.main_grad`` in a custom function's
    backward).

    Stays in memory: parameters (what autocast made of one that is trained is cast again), leaves
    that need a gradient, buffers, smaller tensors, what is saved during a backward, and tensors
    without plain bytes, of which one warning tells.

    The object may be used again, nested and in several threads.

    Args:
        model: A model whose buffers are to stay in memory. Needed only for a model that was built
            before ``import disco_client``, or by ``copy.deepcopy``.
        min_bytes: In bytes or as ``"1MiB"``; default that of :func:`disco_client.connect`.

    Raises:
        TypeError: ``model`` is something else: a size, or a function to decorate.
        ValueError: ``min_bytes`` is malformed.
        UnsupportedCall: A transform of ``torch.func`` was called inside: torch does not let them
            run under saved-tensor hooks.
        DiscodError: No daemon, or no room. In backward: the blob cannot be had.

    Example:
        >>> with disco_client.offload():  # doctest: +SKIP
        ...     loss = model(batch)
        >>> loss.backward()  # doctest: +SKIP
    """

    def __init__(
        self, model: torch.nn.Module | None = None, *, min_bytes: int | str | None = None
    ) -> None:
        if model is not None:
            if not isinstance(model, torch.nn.Module):
                raise TypeError(
                    "offload() takes a model (torch.nn.Module) or nothing, not "
                    f"{type(model).__name__}; give a size as offload(min_bytes=...), and "
                    "decorate a function with @offload()"
                )
            remember(model)
        self._min_bytes = None if min_bytes is None else _size(min_bytes)
        self._entered = _Stack()

    @runs_eagerly
    def __enter__(self) -> None:
        entry = None
        if torch.is_grad_enabled():
            tally.calls += 1
            entry = _Entry(self._min_bytes)
            entry.hooks.__enter__()
        self._entered.stack.append(entry)

    @runs_eagerly
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entry = self._entered.stack.pop()
        if entry is None:
            return
        entry.over = True
        entry.hooks.__exit__()
        if isinstance(error, RuntimeError) and _FUNC_REFUSAL in str(error):
            raise UnsupportedCall(
                "a torch.func transform was called inside disco_client.offload(), and torch lets "
                "none run under saved-tensor hooks; call it outside of the block, or use "
                "disco_client.checkpoint for the layers instead"
            ) from error

    def __call__(self, function: _F) -> _F:
        """Decorate ``function``: each call of it is a block of its own.

        Raises:
            UsageError: It is a generator or coroutine function, whose body runs after the call.
        """
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise UsageError(
                f"offload() cannot decorate {name_of(function)}: its body runs after the call "
                "has returned, outside of the block. Use a with block inside of it"
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # the same signature


class _Entry:
    """One time that a block was entered.

    Its hooks rest where they would do harm: in backward, when that runs in the block too, since
    what a reentrant checkpoint saves there is needed at once; and after the block, since autograd's
    engine puts hooks back that were left from within a backward hook.
    """

    def __init__(self, min_bytes: int | None) -> None:
        self.over = False
        self.hooks = connection.current().packer.hooks(_group, min_bytes, self._rests)

    def _rests(self) -> bool:
        return self.over or _in_backward()


def saved_everywhere() -> torch.autograd.graph.saved_tensors_hooks:
    """As ``offload()``, for a whole program: it attaches at the first save, not when it begins."""

    def pack(tensor: torch.Tensor) -> Any:
        if _in_backward():
            return Kept(tensor)
        tally.calls += 1
        return connection.current().packer.hooks(_group).pack_hook(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Stack(threading.local):
    """What this thread has entered, innermost last; None where gradients were off."""

    def __init__(self) -> None:
        self.stack: list[_Entry | None] = []


def _size(text: int | str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"min_bytes: {error}") from error
