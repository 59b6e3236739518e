"""A device ring: GPU memory of this process that the daemon's GPU process has open too.

Allocated by the driver and not by torch, whose segments cannot be exported when they are
expandable. It has extents, and interprocess events by whose numbers the daemon is told what to wait
for. Extents and events are taken and given back inside of sections.
"""

from collections import deque

from disco_client.extents import ExtentAllocator
from discod.cuda_driver import Driver
from discod.wire import align_up
from discod.wire.messages import OpenRing

EVENTS = 64
"""Copies under way at a time: of the largest size, more than any ring holds."""

UNIT_BYTES = 2 << 20
"""The driver's unit of GPU memory. A smaller ring would share its unit with other allocations, and
the process that opens the ring would have those open, too."""

CHUNK_BYTES = 64 << 20
"""Most bytes of one copy: a tensor larger than the ring goes through it piece by piece."""


class Ring:
    """The ring of one GPU.

    Args:
        number: What the daemon calls it.
        driver: CUDA.
        ordinal: The GPU, as this process counts them.
        size_bytes: Rounded up to whole ``UNIT_BYTES``.

    Raises:
        CudaError: There is no memory, or this GPU or container cannot share it.
    """

    def __init__(self, number: int, driver: Driver, ordinal: int, size_bytes: int) -> None:
        self.number = number
        self.driver = driver
        self.ordinal = ordinal
        self.size_bytes = max(1, -(-size_bytes // UNIT_BYTES)) * UNIT_BYTES
        self.chunk_bytes = min(CHUNK_BYTES, self.size_bytes // 2)
        self._extents = ExtentAllocator(self.size_bytes)
        self._free_events = list(range(EVENTS))
        self._left: deque[tuple[int, int]] = deque()
        self.events: list[int] = []
        with driver.on(ordinal):
            self.address = driver.mem_alloc(self.size_bytes)
            try:
                self._handle = driver.ipc_mem_handle(self.address)
                for _ in range(EVENTS):
                    self.events.append(driver.event_create(interprocess=True))
                self._event_handles = tuple(map(driver.ipc_event_handle, self.events))
            except BaseException:
                self.free()
                raise
        self._uuid = driver.device_uuid(ordinal)

    def open_request(self, seq: int, epoch: int) -> OpenRing:
        """What tells a daemon of it."""
        return OpenRing(
            seq,
            epoch,
            ring=self.number,
            uuid=self._uuid,
            handle=self._handle,
            ring_bytes=self.size_bytes,
            events=self._event_handles,
        )

    def take(self, nbytes: int) -> int | None:
        """An extent for up to ``chunk_bytes``; None: wait until others are given back."""
        while self._left:
            self.give(*self._left.popleft())
        return self._extents.allocate(align_up(nbytes))

    def give(self, offset: int, nbytes: int) -> None:
        """Give an extent back: nobody reads or writes it any more."""
        self._extents.free(offset, align_up(nbytes))

    def take_event(self) -> int | None:
        """The number of an interprocess event that nobody waits for."""
        return self._free_events.pop() if self._free_events else None

    def leave(self, offset: int, nbytes: int) -> None:
        """As :meth:`give`, outside of a section too."""
        self._left.append((offset, nbytes))

    def give_event(self, number: int) -> None:
        """The daemon waits for it no more."""
        self._free_events.append(number)

    def free(self) -> None:
        """Free everything. No other process may have the memory open."""
        with self.driver.on(self.ordinal):
            self.driver.context_synchronize()
            self.driver.mem_free(self.address)
            for event in self.events:
                self.driver.event_destroy(event)
