"""Any accelerator with streams and events: copies run beside the computation, on two streams each.

Works over what ``torch.get_device_module()`` gives for the device type (``torch.cuda``,
``torch.xpu``, a plug-in's), so that it needs no module for each.
"""

import threading
from collections.abc import Iterator
from typing import Any

import torch

from disco_client.arena import Arena
from disco_client.devices.interface import Arrival, Departure
from disco_client.errors import HandleReleased

STAGING_BYTES = 1 << 30
"""At most: several layers' inputs, so that the trainer's thread stays ahead of the device."""
STAGING_SHARE = 1 / 32
"""Of a device's memory, where that is less: copies must not take what they are to free."""


class Streamed:
    """The device type whose streams ``module`` gives. See :class:`interface.Device`.

    Args:
        arena: Where to copy to and from.
        module: With ``Stream(device)``, ``current_stream(device)`` and ``stream(stream)``.
    """

    def __init__(self, arena: Arena, module: Any) -> None:
        self._arena = arena
        self._module = module
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def check(self, device: torch.device) -> None:
        """As :meth:`interface.Device.check`; nothing is known to forbid it."""

    def stage_out(self, flat: torch.Tensor, slot: int) -> Departure:
        """As :meth:`interface.Device.stage_out`."""
        arena = self._mapping()
        stream = self._side_stream(flat.device, "out")
        origin = self._module.current_stream(flat.device)
        try:
            ready = self._ticket(origin, lent=True)
            stream.wait_event(ready.event)
            for start, end in self._parts(slot, slot + flat.nbytes):
                self._copy(stream, _bytes(arena, start, end), flat[start - slot : end - slot])
            return Departure(flat, self._ticket(stream, arena=arena), ready)
        except BaseException:
            stream.synchronize()
            raise

    def stage_in(self, slot: int, nbytes: int, device: torch.device) -> Arrival:
        """As :meth:`interface.Device.stage_in`."""
        arena = self._mapping()
        flat = self._allocate(nbytes, device)
        stream = self._side_stream(flat.device, "in")
        try:
            stream.wait_stream(self._module.current_stream(flat.device))
            for start, end in self._parts(slot, slot + nbytes):
                self._copy(stream, flat[start - slot : end - slot], _bytes(arena, start, end))
            return Arrival(flat, self._ticket(stream, lent=True, arena=arena))
        except BaseException:
            stream.synchronize()
            raise

    def reachable(self) -> bool:
        """As :meth:`interface.Device.reachable`."""
        return True

    def staging_bytes(self, device: torch.device) -> int:
        """As :meth:`interface.Device.staging_bytes`."""
        return STAGING_BYTES

    def shortages(self, device: torch.device) -> int:
        """As :meth:`interface.Device.shortages`; they are not counted here."""
        return 0

    def close(self) -> None:
        """As :meth:`interface.Device.close`."""
        with self._lock:
            streams = dict(self._streams)
        for stream in streams.values():
            stream.synchronize()
        with self._lock:  # only now: an interrupted close is done again
            self._streams = {}

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give ``stream`` a copy to do; both must live until it is done."""
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def _ticket(
        self, stream: Any, lent: bool = False, arena: memoryview | None = None
    ) -> "StreamTicket":
        return StreamTicket(self._module, stream.record_event(), lent, arena)

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The arena's bytes from ``start`` to ``end``, in parts that one copy can take each."""
        yield start, end

    def _mapping(self) -> memoryview:
        """The arena, which stays mapped for as long as this is kept."""
        view = self._arena.view
        if not view:
            raise HandleReleased(
                "this process has detached from the daemon (close()) in the middle of this call, "
                "and what it had saved is gone; end other threads' calls before close()"
            )
        return view

    def _side_stream(self, device: torch.device, direction: str) -> Any:
        key = device, direction
        with self._lock:
            if key not in self._streams:
                self._streams[key] = self._module.Stream(device)
            return self._streams[key]


class StreamTicket:
    """The end of what was on a stream by now. See :class:`interface.Ticket`.

    Args:
        module: As for :class:`Streamed`.
        event: Recorded there.
        lent: Whether the stream that joins may not be the one that the memory was allocated on.
        arena: What the copy needs of the arena, kept as long as this: a close does not unmap it.
    """

    needs_daemon = False

    def __init__(
        self, module: Any, event: Any, lent: bool = False, arena: memoryview | None = None
    ) -> None:
        self._module = module
        self.event = event
        self._lent = lent
        self._arena = arena

    def done(self) -> bool:
        """As :meth:`interface.Ticket.done`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """As :meth:`interface.Ticket.wait`."""
        self.event.synchronize()

    def join(self, flat: torch.Tensor) -> None:
        """As :meth:`interface.Ticket.join`."""
        current = self._module.current_stream(flat.device)
        current.wait_event(self.event)
        if self._lent:
            self._lend(flat, current)

    def _lend(self, flat: torch.Tensor, stream: Any) -> None:
        """Let the allocator know of a stream that uses the memory; nothing where it is its own."""
        if not flat.is_cpu:  # whose allocator knows no streams
            flat.record_stream(stream)


def _bytes(arena: memoryview, start: int, end: int) -> torch.Tensor:
    return torch.frombuffer(arena[start:end], dtype=torch.uint8)
