"""Which tensors are buffers of a model, and so alive whatever becomes of the graph.

A buffer is a plain tensor; nothing about it says what it is. So modules are remembered when they
register one, which all do that are built after this is imported; the others by :func:`remember`.
Copies made by ``copy.deepcopy`` do not register anything: their buffers are offloaded as any
other tensor is, which costs a copy and is right.
"""

import weakref

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parameter import UninitializedBuffer

_LEAST_BYTES = 4096
"""Smaller buffers are not worth knowing: batch norms have many."""

_modules: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
"""By id: a module may define equality, or have no hash, at least not while it is being built."""


def is_buffer(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` shares memory with a buffer of a module that is known.

    Asked only of tensors without history, which is what buffers are.
    """
    owner = tensor if tensor._base is None else tensor._base
    if owner.grad_fn is not None or owner.requires_grad:
        return False
    storage = owner.untyped_storage()._cdata
    return any(
        storage == buffer.untyped_storage()._cdata
        for reference in _modules.valuerefs()  # a list: other threads may be building modules
        if (module := reference()) is not None
        for buffer in list(module._buffers.values())
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided
    )


def remember(model: torch.nn.Module) -> None:
    """Know the buffers of a model that was built before this module was imported, or copied."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            _note(module, name, buffer)


def _note(module: torch.nn.Module, name: str, buffer: torch.Tensor | None) -> None:
    if buffer is None or torch.compiler.is_compiling():  # by a module that was noted when made
        return
    lazy = isinstance(buffer, UninitializedBuffer)  # has no size yet, and errors when asked
    if lazy or buffer.numel() * buffer.element_size() >= _LEAST_BYTES:
        _modules[id(module)] = module


register_module_buffer_registration_hook(_note)
