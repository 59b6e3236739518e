"""The arena's pages pinned for a GPU, so that it copies to and from them by itself.

*Why in pieces.* The arena is backed by memory in steps, as far as it is used, and registering
touches every page: so a piece is registered when a copy first needs it, once, at some 0.1 s/GB (an
estimate). A copy must not cross from one piece to the next, so it is cut there.
"""

import logging
import threading
import time
from collections.abc import Iterator

from disco_client.arena import Arena
from discod.cuda_driver import CudaError, Driver
from discod.wire import align_up
from discod.wire.sizes import format_size

PIECE_BYTES = 256 << 20
"""Also the arena's backing step from then on: some thousand pieces in the largest arenas."""

_log = logging.getLogger(__name__)


class Pinning:
    """The pinned pages of one arena. Thread-safe.

    Args:
        arena: Whose pages.
        driver: Registers them.
        ordinal: Of the GPU by whose context that is done; they are pinned for all.
    """

    def __init__(self, arena: Arena, driver: Driver, ordinal: int) -> None:
        self._arena = arena
        self._driver = driver
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._ends: list[int] = []
        """The end of each piece; each begins where the one before it ends."""
        self._seconds = 0.0
        self._told_bytes = 0
        self._failed = False
        arena.step_bytes = PIECE_BYTES

    @property
    def pinned_bytes(self) -> int:
        """How far the arena is pinned, from its start."""
        return self._ends[-1] if self._ends else 0

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The arena's bytes from ``start`` to ``end``, pinned if that can be, one piece each."""
        self._cover(end)
        for piece_end in self._ends:
            if start < piece_end:
                yield start, min(end, piece_end)
                start = piece_end
                if start >= end:
                    return
        yield start, end

    def close(self) -> None:
        """Unpin everything. No copy may be under way."""
        with self._lock:
            ends, self._ends = self._ends, []
            self._failed = True
            start = 0
            for end in ends:
                try:
                    with self._driver.on(self._ordinal):
                        self._driver.host_unregister(self._arena.address + start)
                except CudaError as error:
                    _log.warning("a part of the arena could not be unpinned: %s", error)
                start = end

    def _cover(self, end: int) -> None:
        """Register what is backed up to ``end`` and is not registered."""
        if end <= self.pinned_bytes or self._failed:
            return
        with self._lock:
            while self.pinned_bytes < end and not self._failed:
                start = self.pinned_bytes
                length = min(PIECE_BYTES, max(self._arena.backed_bytes, align_up(end)) - start)
                began = time.monotonic()
                try:
                    with self._driver.on(self._ordinal):
                        self._driver.host_register(self._arena.address + start, length)
                except CudaError as error:
                    self._failed = True
                    _log.warning(
                        "%s of the arena's %s could not be pinned (%s): copies to and from the "
                        "GPU make the training wait. See whether the container or cgroup has room "
                        "for it, and whether memory may be locked (ulimit -l; docker run --ulimit "
                        "memlock=-1); or set a smaller arena (DISCOD_ARENA)",
                        format_size(self._arena.size_bytes - start),
                        format_size(self._arena.size_bytes),
                        error,
                    )
                    return
                self._seconds += time.monotonic() - began
                self._ends.append(start + length)
                self._tell()

    def _tell(self) -> None:
        """Log the progress, each time that the pinned part has doubled, and at the end."""
        pinned = self.pinned_bytes
        if pinned >= 2 * self._told_bytes or pinned == self._arena.size_bytes:
            self._told_bytes = pinned
            _log.info(
                "pinned %s of the arena's %s, in %.1f s so far",
                format_size(pinned),
                format_size(self._arena.size_bytes),
                self._seconds,
            )
