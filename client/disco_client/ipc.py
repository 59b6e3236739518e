"""CUDA IPC: the daemon's GPU process copies between a device ring and the arena.

It spares this process the pinning of the arena and the copy streams, and costs a CUDA context in
the other. What the daemon fails to copy is copied here, so that nothing is lost, and everything
after it, without the daemon. The steps of a copy are in :mod:`disco_client.ipc_copies`.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from disco_client.arena import Arena
from disco_client.devices.interface import Arrival, Departure, Device
from disco_client.devices.streamed import StreamTicket
from disco_client.ipc_copies import InCopies, Lane, OutCopies
from disco_client.ring import Ring
from disco_client.session import Session
from discod.cuda_driver import CudaError, Driver
from discod.wire.messages import CloseRing, Failed, Reply
from discod.wire.sizes import format_size

DETACH_SECONDS = 5.0
"""For the daemon to close a ring, which takes milliseconds; then its memory is left to the end."""

_log = logging.getLogger(__name__)


class Ipc:
    """The GPUs, through the daemon. See :class:`disco_client.devices.interface.Device`.

    Args:
        session: Whose daemon copies.
        arena: The session's.
        driver: CUDA.
        module: As for :class:`disco_client.devices.streamed.Streamed`; streams also have a
            ``cuda_stream``, the driver's handle.
        fallback: Copies in this process when the daemon cannot.
        ring_bytes: The size of a GPU's ring.
    """

    def __init__(
        self,
        session: Session,
        arena: Arena,
        driver: Driver,
        module: Any,
        fallback: Device,
        ring_bytes: Callable[[torch.device], int],
    ) -> None:
        self._session = session
        self._arena = arena
        self._driver = driver
        self._module = module
        self._fallback = fallback
        self._ring_bytes = ring_bytes
        self._lock = threading.Lock()
        self._lanes: dict[torch.device, Lane] = {}
        self._opening: dict[torch.device, tuple[Ring, list[Reply]]] = {}
        """Rings that the daemon was told of, and its answers: an interrupt may come between."""
        self._failed = False

    def check(self, device: torch.device) -> None:
        """As :meth:`interface.Device.check`."""
        self._fallback.check(device)

    def stage_out(self, flat: torch.Tensor, slot: int) -> Departure:
        """As :meth:`interface.Device.stage_out`."""
        lane = self._lane(flat.device)
        if lane is None:
            return self._fallback.stage_out(flat, slot)
        origin = self._module.current_stream(flat.device)
        ready = StreamTicket(self._module, origin.record_event(), lent=True)
        copies = OutCopies(lane, slot)
        try:
            copies.start(flat)
            ready.join(flat)  # the allocator has to know this stream before the source is let go
            return Departure(flat, copies, ready, taken=True)
        except BaseException:
            self._session.wait_or_tear(copies.done)
            raise

    def stage_in(self, slot: int, nbytes: int, device: torch.device) -> Arrival:
        """As :meth:`interface.Device.stage_in`."""
        lane = self._lane(device)
        if lane is None:
            return self._fallback.stage_in(slot, nbytes, device)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        copies = InCopies(lane, slot, flat)
        try:
            copies.start()
            return Arrival(flat, copies)
        except BaseException:
            copies.wait()
            raise

    def reachable(self) -> bool:
        """As :meth:`interface.Device.reachable`."""
        return self._fallback.reachable()

    def staging_bytes(self, device: torch.device) -> int:
        """As :meth:`interface.Device.staging_bytes`."""
        return self._fallback.staging_bytes(device)

    def shortages(self, device: torch.device) -> int:
        """As :meth:`interface.Device.shortages`."""
        return self._fallback.shortages(device)

    def close(self) -> None:
        """As :meth:`interface.Device.close`: the *acknowledged detach*.

        Memory that another process has open must not be freed. So the daemon is asked to close each
        ring; one that it does not acknowledge in time is left to the end of this process.
        """
        rings = [lane.ring for lane in self._lanes.values()]
        rings += [ring for ring, _ in self._opening.values()]
        self._lanes, self._opening = {}, {}
        left = {ring.number for ring in rings}
        link = self._session.link
        for number in left:
            link.withdraw(number)
            link.request(partial(CloseRing, ring=number), partial(_closed, left, number))
        deadline = time.monotonic() + DETACH_SECONDS
        while left and not link.lost and (patience := deadline - time.monotonic()) > 0:
            link.wait(min(patience, link.patience))
            link.drain()
            link.check(blocked=False)
        for ring in rings:
            if ring.number in left:
                _log.warning(
                    "the daemon has not let go of this process's %s of GPU memory (its device "
                    "ring), so it stays until this process ends",
                    format_size(ring.size_bytes),
                )
            else:
                _free(ring)
        self._fallback.close()

    def _lane(self, device: torch.device) -> Lane | None:
        """The GPU's lane, opened at first; None: copy without the daemon."""
        lane = self._lanes.get(device)
        if lane is None and not self._failed:
            with self._lock:
                lane = self._lanes.get(device)
                if lane is None and not self._failed:
                    lane = self._open(device)
        return None if self._failed else lane

    def _open(self, device: torch.device) -> Lane | None:
        try:
            ring, answers = self._opening.get(device) or self._begin_to_open(device)
        except CudaError as error:
            self._fail(f"its GPU memory cannot be shared: {error}")
            return None
        self._session.wait_for(lambda: bool(answers))
        if self._failed:
            self._session.wait_for(lambda: self._session.link.withdraw(ring.number))
            del self._opening[device]
            _free(ring)
            return None
        stream = self._module.Stream(device)
        lane = Lane(self._session, self._arena, ring, self._module, stream, self._fail)
        del self._opening[device]
        self._lanes[device] = lane
        return lane

    def _begin_to_open(self, device: torch.device) -> tuple[Ring, list[Reply]]:
        ordinal, size_bytes = device.index or 0, self._ring_bytes(device)
        number = len(self._lanes) + len(self._opening)
        ring = Ring(number, self._driver, ordinal, size_bytes)
        answers: list[Reply] = []

        def answered(reply: Reply) -> None:
            answers.append(reply)
            if isinstance(reply, Failed):
                self._fail(reply.text)

        link = self._session.link
        opening = self._opening[device] = ring, answers
        self._session.wait_for(lambda: link.enroll(ring.number, ring.open_request, answered))
        return opening

    def _fail(self, text: str) -> None:
        if not self._failed:
            self._failed = True
            _log.warning(
                "the daemon cannot copy to and from the GPU, so this process does it from now on, "
                "as with transport='shared-memory': %s",
                text,
            )


def _closed(left: set[int], number: int, reply: Reply) -> None:
    left.discard(number)


def _free(ring: Ring) -> None:
    try:
        ring.free()
    except CudaError as error:
        _log.warning("a device ring could not be freed: %s", error)
