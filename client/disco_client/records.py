"""The blobs of a residency by their ids: what is known of each, and whether a call is in order."""

from disco_client.blobs import Blob, Io, State
from disco_client.errors import HandleReleased
from disco_client.extents import ScratchSpace
from disco_client.holdings import Holdings


class Records:
    """The blobs of ``held``, to look at. What is done with them is in ``residency.py``.

    Args:
        held: The blobs and their places.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held

    @property
    def scratch(self) -> ScratchSpace:
        """The extents; to look at only."""
        return self._held.scratch

    @property
    def arena_used_bytes(self) -> int:
        """Bytes of all slots."""
        return self._held.arena.used_bytes

    def slot(self, blob: int) -> int:
        """The arena offset of the blob's slot.

        Raises:
            HandleReleased: No such blob.
            ValueError: The blob is not in RAM.
        """
        record = self._known(blob)
        if record.slot is None:
            raise ValueError(f"blob {blob} has no slot; it is {record.state}")
        return record.slot

    def state(self, blob: int) -> State:
        """The blob's state; FREED also when nothing is known of it any more."""
        record = self._held.blobs.get(blob)
        return State.FREED if record is None else record.state

    def size(self, blob: int) -> int:
        """Bytes of the blob's slot.

        Raises:
            HandleReleased: No such blob.
        """
        return self._known(blob).size_bytes

    def _known(self, blob: int) -> Blob:
        record = self._held.blobs.get(blob)
        if record is None:
            raise HandleReleased(f"blob {blob} is not known here, or was released")
        return record

    def _live(self, blob: int) -> Blob:
        record = self._known(blob)
        if record.state is State.FREED:
            raise HandleReleased(f"blob {blob} was released")
        return record

    def _filling(self, blob: int) -> Blob:
        record = self._held.blobs.get(blob)
        if record is None or not record.filling:
            raise ValueError(f"blob {blob} is not being filled; it is {self.state(blob)}")
        record.filling = False
        self._held.in_flight -= 1
        return record

    def _completed(self, blob: int, io: Io) -> Blob:
        record = self._held.blobs.get(blob)
        if record is None or record.io is not io:
            raise ValueError(f"blob {blob} has no {io} in flight; it is {self.state(blob)}")
        self._held.completed(record)
        return record
