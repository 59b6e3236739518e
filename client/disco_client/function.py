"""``Disco``: reentrant gradient checkpointing as an autograd Function, inputs kept by discod.

Source of the names and signatures: ``axolotl/monkeypatch/gradient_checkpointing/offload_disk.py``.
The semantics are those of torch's reentrant checkpoint, whose Function this one extends; what
that form would get wrong in silence raises here at once. New code is better served by
:func:`disco_client.checkpoint`.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from disco_client import connection
from disco_client.compiling import runs_eagerly
from disco_client.errors import UnsupportedCall, UnsupportedKeyword, UnsupportedOutput
from disco_client.fsdp import refuse_second_recomputation
from disco_client.hooks import recomputed_region, region_depth
from disco_client.inplace import InputGuard, name_of
from disco_client.manager import DiskOffloadManager
from disco_client.residency import Group
from disco_client.tally import tally

_managers: dict[tuple[int, bool, int], DiskOffloadManager] = {}


class Disco(torch.autograd.Function):
    """``Disco.apply(layer, hidden_states, *args)`` runs ``layer``, keeping none of its activations.

    RNG state and autocast are as in the forward when ``layer`` runs again in backward; every
    tensor argument gets its gradient; large tensor arguments stand in the arena or on disk.

    Raises:
        UnsupportedCall: In forward: a keyword argument, an output other than a tensor or a tuple
            or list of tensors and plain values, no input that requires grad though the output
            would, a tensor with history hidden in a closure or partial, an input changed in
            place. In backward: ``create_graph=True``, ``torch.autograd.grad`` and ``inputs=``;
            a layer sharded by FSDP2 that ran twice before it. Use
            :func:`disco_client.checkpoint`, which can do all of these but the last of the
            forward.
    """

    @classmethod
    @runs_eagerly
    def apply(
        cls,
        forward_function: Callable[..., Any],
        hidden_states: Any,
        *args: Any,
        prefetch_size: int = 1,
        prefetch_to_gpu: bool = True,
        save_workers: int = 4,
        **kwargs: Any,
    ) -> Any:
        """Run ``forward_function(hidden_states, *args)``; the settings as in ``get_instance``."""
        if kwargs:
            raise UnsupportedKeyword(
                f"Disco.apply takes no keyword arguments, and got {', '.join(sorted(kwargs))}: "
                "their gradients would be lost. Pass them by position, or use "
                "disco_client.checkpoint(layer, hidden_states, ...), which takes them"
            )
        inputs = (hidden_states, *args)
        if not torch.is_grad_enabled():
            return forward_function(*inputs)
        if not any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
            return _run_without_grad_inputs(forward_function, inputs)
        _refuse_hidden_tensors(forward_function)
        manager = cls.get_instance(prefetch_size, prefetch_to_gpu, save_workers)
        call = _Call(forward_function)
        outputs = offload_reentrant(super().apply, call, inputs, manager.group)
        return list(outputs) if call.returned_list else outputs

    @staticmethod
    def forward(
        ctx: Any,
        forward_function: Callable[..., Any],
        hidden_states: Any,
        *args: Any,
        prefetch_size: int = 1,
        prefetch_to_gpu: bool = True,
        save_workers: int = 4,
    ) -> Any:
        """As torch's ``CheckpointFunction.forward``. ``apply`` has acted on the settings."""
        return CheckpointFunction.forward(ctx, forward_function, True, hidden_states, *args)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """As torch's ``CheckpointFunction.backward``: a gradient for each argument of forward."""
        if torch.is_grad_enabled():
            raise UnsupportedCall(
                "Disco cannot be differentiated twice (backward was called with "
                "create_graph=True): the second-order gradient would be lost. Use "
                "disco_client.checkpoint, which can"
            )
        if not torch.autograd._is_checkpoint_valid():
            raise UnsupportedCall(
                "Disco works with .backward() alone, not with torch.autograd.grad or "
                "backward(inputs=...). Use disco_client.checkpoint, which works with all of them"
            )
        # CheckpointFunction.forward has one argument more, preserve_rng_state.
        return CheckpointFunction.backward(ctx, *grad_outputs)[1:]

    @staticmethod
    def get_instance(
        prefetch_size: int = 1, prefetch_to_gpu: bool = True, save_workers: int = 4
    ) -> DiskOffloadManager:
        """The process's manager with these settings (:class:`DiskOffloadManager`)."""
        settings = (prefetch_size, prefetch_to_gpu, save_workers)
        if settings not in _managers:
            _managers[settings] = DiskOffloadManager(*settings)
        return _managers[settings]


def offload_reentrant(
    apply: Callable[..., Any], function: Callable[..., Any], inputs: tuple[Any, ...], group: Group
) -> Any:
    """``apply(function, *inputs)`` of an autograd Function, what it saves kept by discod.

    The hooks are off while ``function`` runs: what it saves itself is not this call's, and
    ``torch.func`` refuses to run under any.

    Raises:
        UnsupportedCall: ``function`` changed an offloaded input in place.
    """
    if region_depth():
        return apply(function, *inputs)
    tally.calls += 1
    packer = connection.current().packer
    guard = InputGuard(inputs)
    hooks = packer.hooks(group)
    run = _Suspending(function, hooks)
    with hooks:
        outputs = apply(run, *inputs)
    run.hooks = None
    guard.refuse_changes(packer.offloads, function)
    return outputs


class _Suspending:
    """A function that runs outside of the hooks it is called under, in forward."""

    def __init__(
        self, function: Callable[..., Any], hooks: torch.autograd.graph.saved_tensors_hooks
    ) -> None:
        self._function = function
        self.hooks: torch.autograd.graph.saved_tensors_hooks | None = hooks

    def __call__(self, *inputs: Any) -> Any:
        with recomputed_region():
            if self.hooks is None:
                return self._function(*inputs)
            self.hooks.__exit__()
            try:
                return self._function(*inputs)
            finally:
                self.hooks.__enter__()


class _Call:
    """The function as autograd sees it: outputs checked, a list turned into a tuple."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = name_of(function)
        self._ran = False
        self.returned_list = False

    def __call__(self, *inputs: Any) -> Any:
        if self._ran:
            refuse_second_recomputation(self.function)
        self._ran = True
        outputs = self.function(*inputs)
        if isinstance(outputs, torch.Tensor):
            return outputs
        self.returned_list = type(outputs) is list
        items = tuple(outputs) if type(outputs) in (tuple, list) else (outputs,)
        for item in items:
            # A plain value in the tuple passes; anything that may hold tensors loses gradients.
            if not isinstance(item, torch.Tensor | int | float | str | types.NoneType):
                raise UnsupportedOutput(
                    f"Disco cannot return a {type(item).__qualname__} (from "
                    f"{name_of(self.function)}): gradients through it would be lost. Return a "
                    "tensor or a tuple of tensors, or use disco_client.checkpoint"
                )
        return items if type(outputs) in (tuple, list) else outputs


def _run_without_grad_inputs(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Nothing to save, unless the output needs a gradient that this form could not give it."""
    outputs = function(*inputs)
    items = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if any(isinstance(item, torch.Tensor) and item.requires_grad for item in items):
        raise UnsupportedCall(
            f"no input of {name_of(function)} requires grad, but its output does (a frozen "
            "embedding before trainable layers?): Disco would train nothing. Use "
            "disco_client.checkpoint, or call requires_grad_() on the hidden states"
        )
    return outputs


def _refuse_hidden_tensors(function: Callable[..., Any]) -> None:
    for name, value in _bound_values(function):
        for tensor in _tensors(value):
            if tensor.requires_grad and not tensor.is_leaf:
                raise UnsupportedCall(
                    f"{name_of(function)} holds a tensor with autograd history ({name}): its "
                    "gradient would be lost or its graph freed too early. Pass it as an argument "
                    "of Disco.apply, or use disco_client.checkpoint"
                )


def _bound_values(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What partials and closures carry into the call, with a name for each."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {i} of a partial", v) for i, v in enumerate(function.args))
        yield from ((f"{name}= of a partial", v) for name, v in function.keywords.items())
        yield from _bound_values(function.func)
    elif isinstance(function, types.FunctionType):
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"variable {name} of a closure", cell.cell_contents


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
