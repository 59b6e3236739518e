"""What of the blobs is on devices: copies under way, sources that stay, tensors brought ahead.

All of it runs inside of sections and starts no copy: :mod:`disco_client.store` does, outside.

What a device has of a blob, at most one of:

- its *source*, while that has not landed, and as one of the newest saves after that;
- a copy that was brought *ahead* of its load.
"""

from collections import deque
from typing import Protocol

import torch

from disco_client.devices.interface import Arrival, Departure, Lent
from disco_client.residency import Residency
from disco_client.transfers import Transfers

POLL_SECONDS = 0.0005
"""Between looks at copies, in a call that waits: no device wakes a thread by itself."""


class Units(Protocol):
    """What is known of the devices (:class:`disco_client.devices.known.Devices`)."""

    def reachable(self) -> bool:
        """Whether the calling thread may ask them anything now."""

    def limit_bytes(self, device: torch.device) -> int:
        """Most bytes of its memory that copies may hold, each way."""

    def shortages(self, device: torch.device) -> int:
        """How often its memory has run short so far."""

    def close(self) -> None:
        """Wait for all copies, and let go of the arena."""


class NoUnits:
    """There is no device but the CPU, which copies at once."""

    def reachable(self) -> bool:
        """As :meth:`Units.reachable`."""
        return True

    def limit_bytes(self, device: torch.device) -> int:
        """As :meth:`Units.limit_bytes`."""
        return 0

    def shortages(self, device: torch.device) -> int:
        """As :meth:`Units.shortages`."""
        return 0

    def close(self) -> None:
        """As :meth:`Units.close`."""


class Staging:
    """The copies of one session.

    Args:
        residency, transfers: The session's.
        units: Knows the devices' memory.
        keep: How many of the newest saves stay on their device. None: one, and none in a cycle
            after one in which a device ran short of memory.
    """

    def __init__(
        self, residency: Residency, transfers: Transfers, units: Units, keep: int | None
    ) -> None:
        self._residency = residency
        self._transfers = transfers
        self._units = units
        self._fixed_keep = keep
        self._keep = 1 if keep is None else keep
        self._shortages: dict[torch.device, int] = {}
        self._leaving: dict[torch.device, deque[tuple[int, Departure]]] = {}
        self._leaving_bytes: dict[torch.device, int] = {}
        self._sources: dict[int, Departure] = {}
        """Of live blobs: those that have not landed, and the newest; as far as they may be lent."""
        self._newest: deque[int] = deque()
        self._origins: dict[int, tuple[torch.device, int]] = {}
        """Device and bytes of the live blobs that are to be brought back ahead."""
        self._ahead: dict[int, Arrival] = {}
        self._ahead_bytes: dict[torch.device, int] = {}
        self._arriving: deque[tuple[Arrival, memoryview]] = deque()
        self._short = False
        """Whether a copy ahead found no memory in this cycle."""

    @property
    def pending(self) -> bool:
        """Whether a copy is under way, of which nothing but a look will tell."""
        return bool(self._leaving or self._arriving)

    @property
    def device_works(self) -> bool:
        """Whether a copy is under way that ends without the daemon."""
        return any(not copy.needs_daemon for copy in self.under_way)

    @property
    def under_way(self) -> list[Departure | Arrival]:
        """The copies that had not landed at the last look."""
        departures = [departure for copies in self._leaving.values() for _, departure in copies]
        return departures + [arrival for arrival, _ in self._arriving]

    def settle(self) -> bool:
        """Take in the copies that have landed; whether there was any."""
        # A finalizer may come here in the middle of a graph's capture, which a question would end.
        if not self._units.reachable():
            return False
        left = self._settle_leaving()
        return self._settle_arriving() or left

    # Out

    def admits(self, device: torch.device, nbytes: int) -> bool:
        """Whether a copy of that size may begin: one always may, more of them up to the limit."""
        if device not in self._leaving:
            return True
        return self._leaving_bytes[device] + nbytes <= self._units.limit_bytes(device)

    def depart(self, blob: int, departure: Departure, ahead: bool) -> None:
        """The copy of ``blob`` off its device was started; ``ahead``: bring it back unasked."""
        device = departure.device
        self._leaving.setdefault(device, deque()).append((blob, departure))
        self._leaving_bytes[device] = self._leaving_bytes.get(device, 0) + departure.nbytes
        if device not in self._shortages:
            self._shortages[device] = self._units.shortages(device)
        if ahead:
            self._origins[blob] = device, departure.nbytes
        if not departure.lendable:
            departure.let_go()
            return
        self._sources[blob] = departure
        self._newest.append(blob)
        while len(self._newest) > self._keep:
            self._let_go(self._newest.popleft())

    def _settle_leaving(self) -> bool:
        any_landed = False
        for device, copies in list(self._leaving.items()):
            # In their order, which is a stream's: a look at each would cost more than it finds.
            while copies and copies[0][1].landed():
                blob, departure = copies.popleft()
                any_landed = True
                self._leaving_bytes[device] -= departure.nbytes
                filled = self._residency.filled(blob, spoilt=departure.spoilt)
                self._transfers.carry_out(filled)
                if blob not in self._newest:
                    self._let_go(blob)
            if not copies:
                del self._leaving[device], self._leaving_bytes[device]
        return any_landed

    def _let_go(self, blob: int) -> None:
        """Drop a source that need not stay, unless it has yet to land and is needed for that."""
        source = self._sources.get(blob)
        if source is not None and not (source.landed() or source.let_go()):
            return
        self._sources.pop(blob, None)
        if blob in self._origins:
            self._residency.list_ahead(blob)

    # In

    def find(self, blob: int, device: torch.device) -> Arrival | Lent | None:
        """What ``device`` has of ``blob``, unchanged, for a load. A copy ahead is handed over."""
        source = self._sources.get(blob)
        if source is not None and source.device == device and _is_as_saved(source):
            return source.lend()
        arrival = self._ahead.get(blob)
        if arrival is None or arrival.device != device:
            return None
        self._drop_ahead(blob)
        return arrival

    def next_ahead(self) -> tuple[int, torch.device, int] | None:
        """What to bring to its device next: blob, device, bytes. One copy is always allowed."""
        blob = None if self._short else self._residency.next_ahead()
        if blob is None:
            return None
        device, nbytes = self._origins[blob]
        held = self._ahead_bytes.get(device, 0)
        if held and held + nbytes > self._units.limit_bytes(device):
            return None
        return blob, device, nbytes

    def bring_ahead(self, blob: int, arrival: Arrival) -> None:
        """A copy of what :meth:`next_ahead` gave was started."""
        if blob in self._origins:
            self._ahead[blob] = arrival
            held = self._ahead_bytes.get(arrival.device, 0)
            self._ahead_bytes[arrival.device] = held + arrival.nbytes

    def arrive(self, arrival: Arrival, memory: memoryview) -> None:
        """A copy from a slot was started; ``memory`` is its loan, kept until it has landed."""
        self._arriving.append((arrival, memory))

    def give_up(self) -> None:
        """A device has no memory left: drop what can be had again, and bring no more this cycle."""
        self._short = True
        for blob in list(self._ahead):
            self._drop_ahead(blob)
            self._transfers.carry_out(self._residency.give_up_ahead(blob))
        while self._newest:
            self._let_go(self._newest.popleft())

    def _drop_ahead(self, blob: int) -> None:
        arrival = self._ahead.pop(blob)
        self._ahead_bytes[arrival.device] -= arrival.nbytes

    def _settle_arriving(self) -> bool:
        count = len(self._arriving)
        for _ in range(count):
            arrival, memory = self._arriving.popleft()
            if not arrival.landed():
                self._arriving.append((arrival, memory))
        return len(self._arriving) < count

    # Ends

    def forget(self, blob: int) -> None:
        """The blob was freed: of its copies, only those under way are kept until they landed."""
        source = self._sources.pop(blob, None)
        if source is not None:
            source.let_go()
        self._origins.pop(blob, None)
        if blob in self._newest:
            self._newest.remove(blob)
        if blob in self._ahead:
            self._drop_ahead(blob)

    def end_cycle(self) -> None:
        """No blob is alive: look whether memory has run short meanwhile."""
        before, now = self._shortages, {d: self._units.shortages(d) for d in self._shortages}
        self._shortages = now
        self._short = False
        if self._fixed_keep is None:
            self._keep = 0 if any(now[device] > before[device] for device in now) else 1

    def close(self) -> None:
        """All copies have ended, and no blob will be loaded: let go of all memory."""
        held = self._leaving, self._leaving_bytes, self._sources, self._origins, self._ahead
        for things in (*held, self._ahead_bytes, self._newest, self._arriving):
            things.clear()

    def abandon(self) -> None:
        """In a forked child: none of it can be reached from here."""
        for copy in self.under_way:
            copy.abandon()


def _is_as_saved(source: Departure) -> bool:
    """Whether a source can stand for what was saved; of an inference tensor, no one can tell."""
    return not (source.changed or source.flat.is_inference())
