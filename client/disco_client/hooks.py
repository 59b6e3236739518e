"""Saved-tensor hooks: large tensors go to the session, everything else stays as it is.

Hooks switch off autograd's own check that a saved tensor was not changed in place. What is
offloaded does not need it (its bytes were copied at once); what is kept is checked when it is
loaded.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from disco_client.buffers import is_buffer
from disco_client.packed import Kept, Offloaded, Packed, Wrapped
from disco_client.residency import Group
from disco_client.session import Session
from disco_client.sharing import Sharing
from disco_client.tally import tally
from disco_client.tensors import describe, is_supported

_log = logging.getLogger(__name__)
_warned_types: set[type] = set()


class Packer:
    """The pack and unpack hooks of one session.

    Args:
        session: Where large tensors go.
        min_bytes: Smaller tensors stay in memory, unless the caller says otherwise.
    """

    def __init__(self, session: Session, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._sharing = Sharing(session)

    def hooks(
        self, group: Group, min_bytes: int | None = None
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd saves through this packer, for ``group``."""
        least = self.min_bytes if min_bytes is None else min_bytes
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self._pack(tensor, group, least), unpack
        )

    def offloads(self, value: object) -> bool:
        """Whether a saved ``value`` would go to the session, in whole or in part."""
        return isinstance(value, torch.Tensor) and self._wanted(value, self.min_bytes)

    def _pack(self, tensor: torch.Tensor, group: Group, min_bytes: int) -> Packed:
        if not self._wanted(tensor, min_bytes):
            return Kept(tensor)
        if is_supported(tensor):
            return self._store(tensor, group, None)
        names, context = _wrapper(tensor).__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        packed: dict[str, Packed] = {
            name: self._store(part, group, tensor) if _has_bytes(part, min_bytes) else Kept(part)
            for name, part in inner.items()
        }
        return Wrapped(tensor, packed, context)

    def _store(self, tensor: torch.Tensor, group: Group, outer: torch.Tensor | None) -> Offloaded:
        stored, spec = self._sharing.store(tensor, group, outer)
        tally.offloaded += 1
        return Offloaded(stored, spec)

    def _wanted(self, tensor: torch.Tensor, min_bytes: int) -> bool:
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return False
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < min_bytes:
            if nbytes > tally.largest_small_bytes:
                tally.largest_small_bytes, tally.its_min_bytes = nbytes, min_bytes
            return False
        if is_supported(tensor):
            if tensor.is_leaf and tensor.__dict__:  # attributes, which autograd keeps for leaves
                return False
            return _has_bytes(tensor, min_bytes) and not is_buffer(tensor)
        wrapper = _wrapper(tensor)
        if is_traceable_wrapper_subclass(wrapper):
            names, _ = wrapper.__tensor_flatten__()
            if any(_has_bytes(getattr(tensor, name), min_bytes) for name in names):
                return True
        _warn_unsupported(tensor)
        return False


def _wrapper(tensor: torch.Tensor) -> Any:
    """The same object, without the static type that hides the protocol of wrappers."""
    return tensor


def _has_bytes(tensor: torch.Tensor, min_bytes: int) -> bool:
    """Whether a tensor can be stored, and has that many bytes when expanded ones count once."""
    return (
        is_supported(tensor)
        and not tensor.is_inference()
        and describe(tensor).nbytes >= max(1, min_bytes)
    )


def _warn_unsupported(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    tally.unsupported.add(kind.__qualname__)
    if kind not in _warned_types:
        _warned_types.add(kind)
        _log.warning(
            "tensors of type %s (layout %s) stay in memory: they have no plain bytes to offload",
            kind.__qualname__,
            tensor.layout,
        )


def unpack(packed: Packed) -> torch.Tensor:
    """The hook that gives a saved tensor back."""
    return packed.load()


_nesting = threading.local()


@contextmanager
def recomputed_region() -> Iterator[None]:
    """Mark what runs inside as recomputed by an enclosing checkpointed call of discod."""
    _nesting.depth = getattr(_nesting, "depth", 0) + 1
    try:
        yield
    finally:
        _nesting.depth -= 1


def in_recomputed_region() -> bool:
    """Whether an enclosing call recomputes everything here, so that nothing need be stored."""
    return getattr(_nesting, "depth", 0) > 0
