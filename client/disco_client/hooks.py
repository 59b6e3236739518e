"""Saved-tensor hooks: large tensors go to the session, everything else stays as it is.

Hooks switch off autograd's own check that a saved tensor was not changed in place. What is
offloaded does not need it (its bytes were copied at once); what is kept is checked when it is
loaded.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from disco_client.buffers import is_buffer
from disco_client.packed import Constant, Kept, Offloaded, Packed, Recast, Wrapped
from disco_client.residency import Group
from disco_client.sharing import Sharing
from disco_client.store import Store
from disco_client.tally import tally
from disco_client.tensors import describe, is_supported

_log = logging.getLogger(__name__)
_warned_types: set[type] = set()


class Packer:
    """The pack and unpack hooks of one attachment.

    Args:
        store: Where large tensors go.
        min_bytes: Smaller tensors stay in memory, unless the caller says otherwise.
    """

    def __init__(self, store: Store, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._sharing = Sharing(store)

    def hooks(
        self,
        group: Group,
        min_bytes: int | None = None,
        rests: Callable[[], bool] = lambda: False,
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd saves through this packer, for ``group``.

        Args:
            group: The owner that the blobs count for.
            min_bytes: In place of the packer's own.
            rests: Asked at each save; while it says so, everything stays in memory.
        """
        least = self.min_bytes if min_bytes is None else min_bytes

        def pack(tensor: torch.Tensor) -> Packed:
            return Kept(tensor) if rests() else self._pack(tensor, group, least)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def offloads(self, value: object) -> bool:
        """Whether a saved ``value`` would go to the session, in whole or in part."""
        return isinstance(value, torch.Tensor) and self._wanted(value, self.min_bytes)

    def _pack(self, tensor: torch.Tensor, group: Group, min_bytes: int) -> Packed:
        if not self._wanted(tensor, min_bytes):
            return Kept(tensor)
        recast = Recast.of(tensor)
        if recast is not None:
            return recast
        if is_supported(tensor):
            return self._store(tensor, group, None)
        wait = getattr(tensor, "trigger_wait", None)
        if wait is not None:  # an AsyncCollectiveTensor: its bytes may not be there yet
            return self._store(wait(), group, tensor)
        names, context = _wrapper(tensor).__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        packed: dict[str, Packed] = {
            name: self._pack_part(part, group, min_bytes, tensor) for name, part in inner.items()
        }
        return Wrapped(tensor, packed, context)

    def _pack_part(self, part: Any, group: Group, min_bytes: int, outer: torch.Tensor) -> Packed:
        if not isinstance(part, torch.Tensor):
            return Constant(part)
        return self._store(part, group, outer) if _has_bytes(part, min_bytes) else Kept(part)

    def _store(self, tensor: torch.Tensor, group: Group, outer: torch.Tensor | None) -> Offloaded:
        stored, spec = self._sharing.store(tensor, group, outer)
        tally.offloaded += 1
        return Offloaded(stored, spec)

    def _wanted(self, tensor: torch.Tensor, min_bytes: int) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad):
            return False  # alive anyway: the graph holds it for its gradient
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < min_bytes:
            if nbytes > tally.largest_small_bytes:
                tally.largest_small_bytes, tally.its_min_bytes = nbytes, min_bytes
            return False
        if _has_bytes(tensor, min_bytes):
            attributes = tensor.is_leaf and tensor.__dict__  # which autograd keeps for leaves
            return not attributes and not is_buffer(tensor)
        if is_supported(tensor):
            return False
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
    if not is_supported(tensor) or tensor.is_inference():
        return False
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size() >= max(1, min_bytes)
    return describe(tensor).nbytes >= max(1, min_bytes)


def _warn_unsupported(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if torch.compiler.is_compiling() or issubclass(kind, FakeTensor | FunctionalTensor):
        return  # nothing is being saved yet
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
    _nesting.depth = region_depth() + 1
    try:
        yield
    finally:
        _nesting.depth -= 1


def region_depth() -> int:
    """How many enclosing calls recompute everything here; above 0, nothing need be stored."""
    depth: int = getattr(_nesting, "depth", 0)
    return depth
