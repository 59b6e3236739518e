"""A client's arena in the process of a GPU: mapped once, and pinned piece by piece as it is used.

What may be pinned
------------------
Pinning touches every page. Clients back their arenas from the start in steps of
``BACKING_STEP_BYTES``, ahead of every save (:mod:`disco_client.arena`); so where a step holds a
byte of a copy, the whole step is backed as a rule, and pinning all of it takes no memory that the
client did not take. The steps are the pieces: a copy that crosses their borders is split there,
because CUDA takes no copy that leaves the registration in which it begins. Of a client that does
not keep to this, pages appear within the budget that its arena was admitted with.
"""

import logging
import os
from collections.abc import Iterator

from discod.cuda_driver import CudaError, Driver
from discod.syscalls import map_shared, unmap
from discod.wire import BACKING_STEP_BYTES
from discod.wire.sizes import format_size

_log = logging.getLogger(__name__)


class GpuArena:
    """The mapped arena.

    Args:
        driver: CUDA, with a current context.
        fd: The arena's memfd; closed here.
        size_bytes: Its size.

    Attributes:
        pinned: False once CUDA has refused to pin a piece. Copies then block the caller.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, driver: Driver, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.pinned = True
        self._driver = driver
        self._registered: set[int] = set()
        try:
            self._address = map_shared(fd, size_bytes)
        finally:
            os.close(fd)

    def pieces(self, slot: int, length: int) -> Iterator[tuple[int, int]]:
        """Address and size of each part of the range that one copy may take; pins them first."""
        end = slot + length
        while slot < end:
            step = slot // BACKING_STEP_BYTES
            piece_end = min(end, (step + 1) * BACKING_STEP_BYTES)
            if self.pinned and step not in self._registered:
                self._register(step)
            yield self._address + slot, piece_end - slot
            slot = piece_end

    def unpin_some(self) -> bool:
        """Unpin one piece, which takes milliseconds. False when none is left."""
        if not self._registered:
            return False
        step = self._registered.pop()
        self._driver.host_unregister(self._address + step * BACKING_STEP_BYTES)
        return True

    def close(self) -> None:
        """Unmap it. Nothing may be in flight, and nothing pinned."""
        unmap(self._address, self.size_bytes)

    def _register(self, step: int) -> None:
        start = step * BACKING_STEP_BYTES
        length = min(BACKING_STEP_BYTES, self.size_bytes - start)
        try:
            self._driver.host_register(self._address + start, length)
        except CudaError as error:
            self.pinned = False
            _log.warning(
                "%s of an arena cannot be pinned (%s): its copies are slow and hold others up; "
                "give the daemon more locked memory (ulimit -l, LimitMEMLOCK=)",
                format_size(length),
                error,
            )
        else:
            self._registered.add(step)
