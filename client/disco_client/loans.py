"""Loaded blobs, lent to their readers: counted, and what follows when a reader writes to one."""

from disco_client.blobs import Blob, State
from disco_client.errors import BlobModified
from disco_client.holdings import Holdings
from discod.wire.sizes import format_size


class Loans:
    """The loans of all blobs. A blob on loan keeps its slot, and is not written.

    Args:
        held: The blobs and their places.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held

    def is_possible(self, blob: Blob) -> bool:
        """Whether the data is in RAM as it was saved."""
        in_ram = blob.state in (State.DIRTY, State.WRITING, State.CLEAN)
        return in_ram and not blob.lost and not blob.stale

    def check_unmodified(self, blob: Blob) -> None:
        """Raise :class:`BlobModified` when a borrower has changed what would be lent."""
        if not (blob.spoilt or blob.lost or blob.stale):
            return
        fact = f"a tensor of {format_size(blob.size_bytes)} loaded earlier was changed in place"
        remedy = "do not write to loaded tensors, or clone() them first"
        if blob.spoilt:
            raise BlobModified(
                f"a saved tensor of {format_size(blob.size_bytes)} was changed in place, or its "
                "memory given away, while it was being copied off its device, so its value at the "
                "save is gone; change it after backward, or clone() it first"
            )
        if blob.lost:
            raise BlobModified(f"{fact}, and there was no other copy, so it is gone; {remedy}")
        if blob.stale:
            raise BlobModified(
                f"{fact} and another of the same data is still alive, so it cannot be read again; "
                f"drop it and load again; {remedy}"
            )

    def begin(self, blob: Blob) -> None:
        """One more loan of a blob that is in RAM."""
        if blob.pins == 0:
            blob.clean_loan = blob.state is State.CLEAN
        blob.pins += 1
        self._held.settle(blob)

    def end(self, blob: Blob, modified: bool) -> None:
        """One loan less; with the last one, copies go that a borrower has spoilt."""
        blob.pins -= 1
        if blob.state is State.FREED:
            if blob.pins == 0 and blob.io is not None:
                self._held.set_leaving(blob, True)
            self._held.release(blob)
            return
        if modified and blob.clean_loan:
            blob.stale = True
        elif modified:
            blob.lost = True
        if blob.pins:
            return
        if blob.lost and blob.io is None:
            self._held.lose(blob)
        elif blob.stale:
            blob.stale = False
            self._held.evict(blob)
        else:
            self._held.settle(blob)
            self._held.start_wanted(blob.members)
