"""What clients did, as totals of each rank that never fall, whoever has come and gone.

Monitoring takes a total that falls for one that began anew. Those of single processes would end
with each, and a new series begin for each pid; of ranks there are as many as a job has, however
often it is started.
"""

from collections import Counter
from collections.abc import Iterable

from discod.client_report import TOTALS
from discod.tenant import Tenant

MOST_RANKS = 256
"""Of a daemon's life; what others do is counted together. A client can say any number."""

NO_RANK = "none"
OTHERS = "other"


class Ranks:
    """The ranks that a daemon has seen."""

    def __init__(self) -> None:
        self._left: dict[str, Counter[str]] = {}

    def leave(self, tenant: Tenant) -> None:
        """A client is gone, and what it did stays counted."""
        self._add(self._left, tenant)

    def totals(self, tenants: Iterable[Tenant]) -> dict[str, Counter[str]]:
        """Of each rank, what those that are gone did and these, who have not been told to leave.

        ``written_bytes`` and ``read_bytes``, and all of :data:`discod.client_report.TOTALS`.
        """
        totals = {name: Counter(left) for name, left in self._left.items()}
        for tenant in tenants:
            self._left.setdefault(self.name(tenant.who.rank), Counter())
            self._add(totals, tenant)
        return totals

    def name(self, rank: int) -> str:
        """What a rank is called: its number, unless there are too many."""
        text = str(rank) if rank >= 0 else NO_RANK
        return text if text in self._left or len(self._left) < MOST_RANKS else OTHERS

    def _add(self, totals: dict[str, Counter[str]], tenant: Tenant) -> None:
        total = totals.setdefault(self.name(tenant.who.rank), Counter())
        total["written_bytes"] += tenant.traffic.written.size_bytes
        total["read_bytes"] += tenant.traffic.read.size_bytes
        for name in TOTALS:
            total[name] += tenant.told.here(name)
