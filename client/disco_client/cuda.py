"""What CUDA has beside streams: pinned memory, graph capture, the allocator's counts.

The only module that uses ``torch.cuda``. ``devices/streamed.py`` makes the copies, ``pinning.py``
pins the arena, ``ipc.py`` is the other transport.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from disco_client.arena import Arena
from disco_client.devices.interface import Device
from disco_client.devices.streamed import STAGING_BYTES, STAGING_SHARE, Streamed
from disco_client.errors import UnsupportedCall
from disco_client.ipc import Ipc
from disco_client.pinning import Pinning
from disco_client.session import Session
from discod.cuda_driver import CudaUnavailable, load

_log = logging.getLogger(__name__)


def refuse_capture() -> None:
    """Raise where the calling thread captures a CUDA graph.

    Raises:
        UnsupportedCall: It does.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedCall(
            "discod cannot save or load while a CUDA graph is captured: a replay would copy to and "
            "from places that are somebody else's by then. Capture what lies between the calls of "
            "discod, or train without graphs"
        )


def shortages(device: torch.device) -> int:
    """How often torch's allocator had to give back what it had cached, and try again."""
    try:
        counts = torch.cuda.memory_stats(device)
    except RuntimeError:  # a pluggable allocator, which has none
        return 0
    return int(counts.get("num_alloc_retries", 0))


def staging_bytes(device: torch.device) -> int:
    """A share of the GPU's memory, up to a bound."""
    total = torch.cuda.get_device_properties(device).total_memory
    return min(STAGING_BYTES, int(total * STAGING_SHARE))


def cuda_over_ipc(
    session: Session, arena: Arena, unit: torch.device, ring_bytes: Callable[[torch.device], int]
) -> Device:
    """The GPUs through the daemon's GPU processes, or as :class:`Cuda` where that cannot be.

    Args:
        session: Whose daemon copies.
        arena: The session's.
        unit: The first GPU to copy from or to.
        ring_bytes: The size of a GPU's ring.
    """
    here = Cuda(arena, unit)
    try:
        return Ipc(session, arena, load(), torch.cuda, here, ring_bytes)
    except CudaUnavailable as error:
        _log.warning(
            "transport='cuda-ipc' cannot be had, so this process copies, as with 'shared-memory': "
            "%s",
            error,
        )
        return here


class Cuda(Streamed):
    """NVIDIA's GPUs, over the pinned arena. See :class:`disco_client.devices.interface.Device`.

    Args:
        arena: Where to copy to and from; pinned as far as it is used.
        unit: The first GPU to copy from or to. The arena is pinned by its context, for all.
    """

    def __init__(self, arena: Arena, unit: torch.device) -> None:
        super().__init__(arena, torch.cuda)
        self._pinning: Pinning | None = None
        try:
            self._pinning = Pinning(arena, load(), unit.index)
        except CudaUnavailable as error:
            _log.warning(
                "the arena cannot be pinned, so copies to and from the GPU make the training wait: "
                "%s; or name the driver's library in DISCOD_CUDA_LIBRARY",
                error,
            )

    def check(self, device: torch.device) -> None:
        """As :meth:`interface.Device.check`."""
        refuse_capture()

    def reachable(self) -> bool:
        """As :meth:`interface.Device.reachable`."""
        return not torch.cuda.is_current_stream_capturing()

    def staging_bytes(self, device: torch.device) -> int:
        """As :meth:`interface.Device.staging_bytes`."""
        return staging_bytes(device)

    def shortages(self, device: torch.device) -> int:
        """As :meth:`interface.Device.shortages`."""
        return shortages(device)

    def close(self) -> None:
        """As :meth:`interface.Device.close`."""
        with contextlib.suppress(RuntimeError):  # the GPU has failed: nothing can be under way
            super().close()
        if self._pinning is not None:
            self._pinning.close()

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return (
            super()._parts(start, end) if self._pinning is None else self._pinning.parts(start, end)
        )
