"""A tensor kept by the session: its descriptor here, its bytes in a blob."""

import weakref

import torch

from disco_client.errors import HandleReleased
from disco_client.residency import Group
from disco_client.session import Loan, Session
from disco_client.tensors import Layout, TensorSpec, copy_in, describe, rebuild


class StoredTensor:
    """One saved tensor. Its blob is released when this object is collected, or by :meth:`release`.

    Args:
        session: Where to keep it.
        tensor: Any supported tensor (:func:`disco_client.tensors.is_supported`); its bytes are
            copied before this returns, so it may be changed or freed at once.
        group: The owner that the blob counts for.
        spec: The tensor's, where the caller has it.

    Raises:
        UnsupportedTensor: It cannot be kept as bytes.
        RoomError, DaemonLost: As :meth:`Session.save`.
    """

    __slots__ = ("__weakref__", "_blob", "_end", "_session", "spec")

    def __init__(
        self,
        session: Session,
        tensor: torch.Tensor,
        group: Group,
        spec: TensorSpec | None = None,
    ) -> None:
        spec = spec or describe(tensor)
        self.spec = spec
        self._session = session
        self._blob: int | None = None
        self._end: weakref.finalize[[int | Loan], object] | None = None
        if spec.nbytes:
            self._blob, self._end = session.save(
                spec.nbytes, lambda memory: copy_in(tensor, spec, memory), group, owner=self
            )

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
            a later load.

        Raises:
            HandleReleased: It was released.
            BlobError, RoomError, DaemonLost: As :meth:`Session.load`.
        """
        spec = spec or self.spec
        target = spec.device if device is None else device
        if not spec.nbytes:
            return rebuild(torch.empty(0, dtype=torch.uint8), spec, target)
        with torch.inference_mode(mode=False):
            view, loan = self._session.load(self._live_blob(), spec.nbytes)
            flat = torch.frombuffer(view, dtype=torch.uint8)
            del view
            if target.type == "cpu" and spec.layout is Layout.SPAN:
                _watch(flat, loan)
            return rebuild(flat, spec, target)

    def peek(self) -> memoryview | None:
        """The bytes, read-only by agreement, if they are in RAM now. Not a use of the blob."""
        return self._session.peek(self._live_blob(), self.spec.nbytes)

    def wait_saved(self, timeout: float | None) -> None:
        """As :meth:`Session.wait_saved`; an empty tensor is saved from the start."""
        if self.spec.nbytes:
            self._session.wait_saved(self._live_blob(), timeout)

    def release(self) -> None:
        """Forget the blob now; idempotent. Tensors that were loaded from it stay valid."""
        if self._end is not None:
            self._end()

    def _live_blob(self) -> int:
        if self._blob is None or self._end is None or not self._end.alive:
            raise HandleReleased("the tensor was released (cleanup) and cannot be loaded again")
        return self._blob


def _watch(flat: torch.Tensor, loan: Loan) -> None:
    """Let ``loan`` know of in-place changes through any view of ``flat``.

    All views share the version counter. ``witness`` shares it too, but not the storage, so that
    it can outlive the loan without keeping the slot.
    """
    witness = flat.detach()
    witness.data = torch.empty(0, dtype=torch.uint8)
    version = witness._version
    loan.changed = lambda: witness._version != version
