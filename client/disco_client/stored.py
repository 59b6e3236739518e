"""A tensor kept by the session: its descriptor here, its bytes in a blob."""

import torch

from disco_client.errors import HandleReleased
from disco_client.interrupts import End
from disco_client.residency import Group
from disco_client.store import Store
from disco_client.tensors import TensorSpec, describe, rebuild


class StoredTensor:
    """One saved tensor. Its blob is released when this object is collected, or by :meth:`release`.

    Args:
        store: Where to keep it.
        tensor: Any supported tensor (:func:`disco_client.tensors.is_supported`). On the CPU it may
            be changed or freed at once; on a device, freed at once, and changed as ``at_once``
            says.
        group: The owner that the blob counts for.
        spec: The tensor's, where the caller has it.
        at_once, whole: As :meth:`Store.put`.

    Raises:
        UnsupportedTensor: It cannot be kept as bytes.
        UnsupportedCall, RoomError, DaemonLost: As :meth:`Store.put`.
    """

    __slots__ = ("__weakref__", "_blob", "_end", "_store", "spec")

    def __init__(
        self,
        store: Store,
        tensor: torch.Tensor,
        group: Group,
        spec: TensorSpec | None = None,
        *,
        at_once: bool = False,
        whole: torch.Tensor | None = None,
    ) -> None:
        spec = spec or describe(tensor)
        self.spec = spec
        self._store = store
        self._blob: int | None = None
        self._end: End | None = None
        if spec.nbytes:
            self._blob, self._end = store.put(tensor, spec, group, self, at_once, whole)

    def load(
        self, device: torch.device | None = None, spec: TensorSpec | None = None
    ) -> torch.Tensor:
        """The tensor, exactly as it was saved, without autograd history.

        Args:
            device: Where to; by default the device it was saved from.
            spec: Another tensor's that has the same bytes; by default the saved one's.

        Returns:
            On the CPU a zero-copy view of the arena where the layout allows. The slot is kept
            until the tensor's storage is freed; changing it in place is seen and never reaches
            a later load. On a device, memory of its own, or that of the saved tensor where the
            device still has it.

        Raises:
            HandleReleased: It was released.
            UnsupportedCall, BlobError, RoomError, DaemonLost: As :meth:`Store.get`.
        """
        spec = spec or self.spec
        target = spec.device if device is None else device
        if not spec.nbytes:
            return rebuild(torch.empty(0, dtype=torch.uint8, device="cpu"), spec, target)
        return self._store.get(self._live_blob(), spec, target)

    def peek(self) -> memoryview | None:
        """The bytes, read-only by agreement, if they are in RAM now. Not a use of the blob."""
        return self._store.session.peek(self._live_blob(), self.spec.nbytes)

    def wait_saved(self, timeout: float | None) -> None:
        """As :meth:`Session.wait_saved`; an empty tensor is saved from the start."""
        if self.spec.nbytes:
            self._store.session.wait_saved(self._live_blob(), timeout)

    def release(self) -> None:
        """Forget the blob now; idempotent. Tensors that were loaded from it stay valid."""
        if self._end is not None:
            self._end()

    def _live_blob(self) -> int:
        if self._blob is None or self._end is None or not self._end.alive:
            raise HandleReleased("the tensor was released (cleanup) and cannot be loaded again")
        return self._blob
