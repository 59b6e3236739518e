"""A device ring of this process's on a fake GPU, whose memory can be read and written directly."""

import ctypes
from typing import Any

from discod.cuda_driver import Driver
from discod.wire.messages import CopyIn, CopyOut, OpenRing
from tests.helpers.fake_cuda import uuid_of
from tests.helpers.raw_client import RawClient


class DeviceRing:
    """A ring and its events.

    Args:
        driver: The fake CUDA.
        size_bytes: The ring's size.
        ordinal: The GPU.
        number: What the client calls it.
        events: How many events it has.
    """

    def __init__(
        self, driver: Driver, size_bytes: int, ordinal: int = 0, number: int = 0, events: int = 4
    ) -> None:
        self.driver = driver
        self.size_bytes = size_bytes
        self.ordinal = ordinal
        self.number = number
        with driver.on(ordinal):
            self.address = driver.mem_alloc(size_bytes)
            self.events = [driver.event_create(interprocess=True) for _ in range(events)]
            self.handle = driver.ipc_mem_handle(self.address)
            self.event_handles = tuple(map(driver.ipc_event_handle, self.events))
            self.stream = driver.stream_create()

    def open(self, client: RawClient, **changes: Any) -> Any:
        """Open it, and wait."""
        return client.ask(OpenRing, **self.opening() | changes)

    def opening(self) -> dict[str, Any]:
        """The fields of its ``OpenRing``."""
        return {
            "ring": self.number,
            "uuid": uuid_of(self.ordinal),
            "handle": self.handle,
            "ring_bytes": self.size_bytes,
            "events": self.event_handles,
        }

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes into it, at once."""
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, offset: int, length: int) -> bytes:
        """The bytes that are in it now."""
        return ctypes.string_at(self.address + offset, length)

    def record(self, event: int) -> None:
        """Record one of its events on its stream."""
        with self.driver.on(self.ordinal):
            self.driver.event_record(self.events[event], self.stream)

    def copy_out(
        self, client: RawClient, offset: int, slot: int, length: int, event: int = 0
    ) -> int:
        """Send a copy to the arena; returns its seq."""
        place = {"offset": offset, "slot": slot, "length": length}
        return client.send(CopyOut, ring=self.number, event=event, **place)

    def copy_in(self, client: RawClient, offset: int, slot: int, length: int) -> int:
        """Send a copy from the arena; returns its seq."""
        return client.send(CopyIn, ring=self.number, offset=offset, slot=slot, length=length)

    def free(self) -> None:
        """Free its memory."""
        with self.driver.on(self.ordinal):
            self.driver.mem_free(self.address)
