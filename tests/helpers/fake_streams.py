"""CPU tensors as tensors of a GPU whose streams are the fake driver's.

What a test computes happens at once, in the calling thread; copies happen later, in the driver's
threads. So the current stream, where the computation would be, is one that waits at once for
whatever it is told to wait for.
"""

from collections.abc import Iterator

import torch

from disco_client import connection
from disco_client.arena import Arena
from disco_client.devices.interface import Device
from disco_client.devices.streamed import Streamed
from disco_client.ipc import Ipc
from disco_client.pinning import Pinning
from discod.cuda_driver import Driver

_CURRENT = 0
"""The driver's handle of the default stream."""


class EagerDriver(Driver):
    """The driver, whose default stream has done everything when the call returns."""

    def copy_async(self, dst: int, src: int, size: int, stream: int) -> None:
        super().copy_async(dst, src, size, stream)
        if stream == _CURRENT:
            event = self.event_create(interprocess=False)
            self.event_record(event, stream)
            self.event_synchronize(event)
            self.event_destroy(event)


class FakeEvent:
    """An event, with the calls of ``torch.cuda.Event`` that discod makes."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver = driver
        with driver.on(0):
            self.handle = driver.event_create(interprocess=False)
            driver.event_record(self.handle, stream)

    def query(self) -> bool:
        with self._driver.on(0):
            return self._driver.event_query(self.handle)

    def synchronize(self) -> None:
        with self._driver.on(0):
            self._driver.event_synchronize(self.handle)


class FakeStream:
    """A stream, with the calls of ``torch.cuda.Stream`` that discod makes."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver = driver
        self.cuda_stream = handle

    def record_event(self) -> FakeEvent:
        return FakeEvent(self._driver, self.cuda_stream)

    def wait_event(self, event: FakeEvent) -> None:
        if self.cuda_stream == _CURRENT:
            event.synchronize()
        else:
            with self._driver.on(0):
                self._driver.stream_wait_event(self.cuda_stream, event.handle)

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class FakeStreams:
    """What ``torch.get_device_module()`` would give."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._current = FakeStream(driver, _CURRENT)

    def Stream(self, device: torch.device) -> FakeStream:
        with self._driver.on(0):
            return FakeStream(self._driver, self._driver.stream_create())

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current


class FakeGpu(Streamed):
    """Copies by the fake driver, over an arena that it has pinned."""

    def __init__(self, arena: Arena, driver: Driver) -> None:
        super().__init__(arena, FakeStreams(driver))
        self._driver = driver
        self.pinning = Pinning(arena, driver, 0)

    def close(self) -> None:
        super().close()
        self.pinning.close()

    def _copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._driver.on(0):
            self._driver.copy_async(
                target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream
            )

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return self.pinning.parts(start, end)


def use_for_cpu_tensors(driver: Driver, *, over_ipc: bool, ring_bytes: int = 1 << 20) -> Device:
    """Have the attached process, which has saved nothing yet, copy CPU tensors as a GPU's."""
    attached = connection.current()
    arena = attached.session._arena
    device: Device = FakeGpu(arena, driver)
    if over_ipc:
        streams = FakeStreams(driver)
        device = Ipc(attached.session, arena, driver, streams, device, lambda _: ring_bytes)
    attached.store._devices.make("cpu", lambda unit: device)
    return device
