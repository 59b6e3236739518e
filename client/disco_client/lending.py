"""Views of slots that readers hold: what each is of, and whether its holder wrote to it.

How long a blob's slot stays because of them is residency's to decide (:mod:`disco_client.loans`).
"""

from collections.abc import Callable

from disco_client.arena import Arena
from disco_client.interrupts import End


class Loan:
    """A blob's bytes, lent to a reader as a view of its slot.

    Attributes:
        slot: Where in the arena.
        changed: Tells whether the borrower changed the bytes in place; set by the reader.
    """

    __slots__ = ("blob", "changed", "slot")

    def __init__(self, blob: int, slot: int) -> None:
        self.blob = blob
        self.slot = slot
        self.changed: Callable[[], bool] = lambda: False


class Lending:
    """The views of one arena that are alive. Not thread-safe: the session's lock covers it.

    Args:
        arena: The arena.
        returned: Told of each loan whose view is collected, by a finalizer.
    """

    def __init__(self, arena: Arena, returned: Callable[[Loan], None]) -> None:
        self._arena = arena
        self._returned = returned
        self._loans: dict[int, list[Loan]] = {}

    def lend(self, blob: int, slot: int, size_bytes: int) -> tuple[memoryview, Loan]:
        """A writable view; the loan lasts until it is collected."""
        view = self._arena.view[slot : slot + size_bytes]
        loan = Loan(blob, slot)
        self._loans.setdefault(blob, []).append(loan)
        End(view, self._returned, loan).atexit = False
        return view, loan

    def forget(self, loan: Loan) -> None:
        """The loan has ended."""
        loans = self._loans[loan.blob]
        loans.remove(loan)
        if not loans:
            del self._loans[loan.blob]

    def changed(self, blob: int) -> bool:
        """Whether a holder of the blob has changed it in place."""
        loans = self._loans.get(blob)
        return loans is not None and any(loan.changed() for loan in loans)
