"""Saved-tensor hooks: large plain tensors go to the session, everything else stays as it is.

Hooks switch off autograd's own check that a saved tensor was not changed in place. What is
offloaded does not need it (its bytes were copied at once); what is kept is checked here instead.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from disco_client.errors import UnsupportedCall
from disco_client.residency import Group
from disco_client.session import Session
from disco_client.stored import StoredTensor
from disco_client.tensors import copy_in, describe, is_supported

_log = logging.getLogger(__name__)
_warned_types: set[type] = set()


class Kept:
    """A tensor that stays in memory: too small, a parameter, or of a kind without plain bytes.

    Holds it detached: keeping the tensor itself would tie its graph into a cycle.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = version_of(tensor)

    def load(self) -> torch.Tensor:
        """The tensor. Raises ``RuntimeError`` as autograd does when it was changed in place."""
        refuse_stale(self._tensor, self._version)
        return self._tensor


class Packer:
    """The pack and unpack hooks of one session.

    Args:
        session: Where large tensors go.
        min_bytes: Smaller tensors stay in memory.
    """

    def __init__(self, session: Session, min_bytes: int) -> None:
        self._session = session
        self._min_bytes = min_bytes
        self._stored: weakref.WeakValueDictionary[Hashable, _Shared] = weakref.WeakValueDictionary()

    def hooks(self, group: Group) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd saves through this packer, for ``group``."""
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self._pack(tensor, group), _unpack
        )

    def offloads(self, value: object) -> bool:
        """Whether a saved ``value`` would go to the session."""
        return isinstance(value, torch.Tensor) and self._wanted(value)

    def _pack(self, tensor: torch.Tensor, group: Group) -> "Kept | _Shared":
        if not self._wanted(tensor):
            return Kept(tensor)
        key = (*_identity(tensor, group), _contents(tensor))
        stored = self._stored.get(key)
        if stored is None:
            stored = _Shared(self._session, tensor, group)
            self._stored[key] = stored
        return stored

    def _wanted(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() * tensor.element_size() < self._min_bytes:
            return False
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return False
        if tensor.is_leaf and tensor.__dict__:  # attributes, which autograd keeps for leaves
            return False
        if not is_supported(tensor):
            if type(tensor) not in _warned_types:
                _warned_types.add(type(tensor))
                _log.warning(
                    "tensors of type %s (layout %s) stay in memory: they have no plain bytes to "
                    "offload",
                    type(tensor).__qualname__,
                    tensor.layout,
                )
            return False
        return not tensor.is_inference() and describe(tensor).nbytes >= self._min_bytes


class InputGuard:
    """Notices a function that changes its offloaded inputs in place.

    The copy has the values from before the call, while autograd without hooks would refuse the
    changed tensor in backward; so the call is refused at once.
    """

    def __init__(self, inputs: Sequence[object]) -> None:
        self._inputs = inputs
        self._versions = [version_of(value) for value in inputs]

    def refuse_changes(self, packer: Packer, function: Callable[..., Any]) -> None:
        """Raise :class:`UnsupportedCall` when an offloaded input has changed since the start."""
        for position, (value, version) in enumerate(zip(self._inputs, self._versions, strict=True)):
            if version_of(value) != version and packer.offloads(value):
                raise UnsupportedCall(
                    f"input {position} of {name_of(function)} was modified by an inplace "
                    "operation inside it: the recomputation in backward would start from "
                    "other values. Make the operation out of place, or clone the input first"
                )


class _Shared(StoredTensor):
    """A stored tensor that later saves of the very same bytes share.

    Holds a weak reference to the source's storage, so that no new storage can get the address
    that the sharing goes by while this lives.
    """

    __slots__ = ("_source",)

    def __init__(self, session: Session, tensor: torch.Tensor, group: Group) -> None:
        super().__init__(session, tensor, group)
        self._source = StorageWeakRef(tensor.untyped_storage())


def _unpack(packed: Kept | _Shared) -> torch.Tensor:
    return packed.load()


def _contents(tensor: torch.Tensor) -> Hashable:
    """What tells two contents of one buffer apart where the version does not.

    A leaf may be a buffer that is filled anew through ``.data``, numpy or a loader, none of which
    count as a change; so its bytes are hashed, at a third of what storing them again would cost.
    Off the CPU they are not compared, and such a tensor is stored each time. A tensor that
    autograd made is changed in such ways by nobody who wants right gradients.
    """
    if tensor.grad_fn is not None:
        return None
    if tensor.device.type != "cpu":
        return object()
    spec = describe(tensor)
    memory = bytearray(spec.nbytes)
    copy_in(tensor, spec, memoryview(memory))
    return xxhash.xxh3_128_digest(memory)


def _identity(tensor: torch.Tensor, group: Group) -> tuple[Hashable, ...]:
    """Equal only for tensors with the same storage, version and form."""
    return (
        tensor.untyped_storage()._cdata,
        tensor._version,
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.is_conj(),
        tensor.is_neg(),
        id(group),
    )


def refuse_stale(tensor: torch.Tensor, version: int) -> None:
    """Raise as autograd does when ``tensor`` is not at ``version`` any more."""
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a saved {tuple(tensor.shape)} tensor is at version "
            f"{version_of(tensor)}; expected version {version} instead"
        )


def version_of(value: object) -> int:
    """The in-place version of a tensor; -1 for what has none."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return -1
    return value._version


def name_of(function: Callable[..., Any]) -> str:
    """The function's or module's name, for messages."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name
