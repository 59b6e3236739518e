"""Saves of the very same bytes share one blob: masks, position embeddings, views of one storage.

*What tells two saves apart.* The storage, its version, and which of its bytes: the geometry is
each handle's own, so ``x``, ``x.view(...)`` and ``x.t()`` are one blob. Bytes may be changed
without a new version: through ``.data``, numpy, a loader, or a kernel that does not tell autograd.
So a second save is compared by content. Off the CPU, where that would cost as much as storing,
what autograd made is taken to be unchanged, and anything else is stored again.
"""

import weakref
from collections.abc import Hashable

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from disco_client.residency import Group
from disco_client.store import Store
from disco_client.stored import StoredTensor
from disco_client.tensors import Layout, TensorSpec, describe, digest


class SharedTensor(StoredTensor):
    """A stored tensor that later saves of the same bytes share.

    Holds a weak reference to the source's storage, so that no new storage can get the address
    that the sharing goes by while this lives.
    """

    __slots__ = ("_digest", "_made", "_source")

    def __init__(
        self,
        store: Store,
        tensor: torch.Tensor,
        group: Group,
        spec: TensorSpec,
        made: bool,
        outer: torch.Tensor | None,
    ) -> None:
        super().__init__(store, tensor, group, spec, whole=outer)
        self._source = StorageWeakRef(tensor.untyped_storage())
        self._made = made
        self._digest: bytes | None = None

    def holds(self, tensor: torch.Tensor, spec: TensorSpec, made: bool) -> bool:
        """Whether the bytes of ``tensor``, which has the same key, are still the stored ones.

        False also where that cannot be told cheaply, as on disk at the first question.
        """
        if tensor.device.type != "cpu" or not self._store.copies_at_once(tensor.device):
            return made and self._made
        if self._digest is None:
            stored = self.peek()
            if stored is None:
                return False
            self._digest = xxhash.xxh3_128_digest(stored)
        return self._digest == digest(tensor, spec)


class Sharing:
    """The stored tensors of one attachment, by what they are copies of.

    Args:
        store: Where to keep them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stored: weakref.WeakValueDictionary[Hashable, SharedTensor] = (
            weakref.WeakValueDictionary()
        )

    def store(
        self, tensor: torch.Tensor, group: Group, outer: torch.Tensor | None = None
    ) -> tuple[SharedTensor, TensorSpec]:
        """Store ``tensor`` (above 0 bytes), or find it stored; load it with its own spec.

        Args:
            tensor: A supported tensor.
            group: The owner that its blob counts for.
            outer: The subclass instance whose inner tensor it is, which has the version and the
                history of both.

        Raises:
            RoomError, DaemonLost: As :meth:`Session.save`.
        """
        spec = describe(tensor)
        history = tensor if outer is None else outer
        made = _owner(history).grad_fn is not None
        key = _identity(tensor, spec), history._version, id(group)
        stored = self._stored.get(key)
        if stored is None or not stored.holds(tensor, spec, made):
            stored = SharedTensor(self._store, tensor, group, spec, made, outer)
            self._stored[key] = stored
        return stored, spec


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view is of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def _identity(tensor: torch.Tensor, spec: TensorSpec) -> tuple[Hashable, ...]:
    """Equal only for tensors whose bytes are the same ones, of the same version."""
    storage = tensor.untyped_storage()._cdata
    start = tensor.storage_offset() * tensor.element_size()
    if spec.layout is Layout.SPAN:
        return storage, tensor._version, start, spec.nbytes
    return storage, tensor._version, start, spec.shape, spec.stride, tensor.element_size()
