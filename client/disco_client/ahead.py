"""Blobs that a device may want back before they are asked for, soonest next use first."""

from disco_client.blobs import Blob, Ranking
from disco_client.plan import Order


class Ahead:
    """The blobs that were saved from a device which has no copy of them any more.

    Args:
        order: Gives each blob's next use.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ranking = Ranking(farthest_first=False)

    def add(self, blob: Blob) -> None:
        """List a blob that was not loaded yet."""
        blob.listed = True
        self._ranking.add(blob, self._order.next_use(blob.index, used=False))

    def discard(self, blob: Blob) -> None:
        """Strike a blob, if it is listed."""
        if blob.listed:
            blob.listed = False
            self._ranking.discard(blob)

    def first(self) -> Blob | None:
        """The listed blob that is needed first."""
        return self._ranking.first()

    def rank_all(self) -> None:
        """Rank every blob anew: the order of the cycle has changed."""
        for blob in self._ranking:
            self.add(blob)
