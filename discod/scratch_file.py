"""One nameless scratch file of one client: it grows in large steps, within the quota.

Growing and trimming can wait for the disk: they run in I/O threads, never on the event loop.

Why a trim cannot lose a write
------------------------------
A trim is decided on the event loop and truncates later, in another thread, while a new write may
be queued. (1) The loop calls :meth:`ScratchFile.keep` before it queues any write, and a trim that
was decided before that call does nothing. (2) A trim holds the lock from that check to the end
of the truncation, and does nothing while a piece of a write is between begin and end. (3) A piece
begins under the same lock, and reserves again what a trim has taken. So a truncation that passed
its check before the write was queued is over before the write begins, and any other is skipped.
"""

import errno
import os
import threading
from collections.abc import Mapping

from discod.budget import Budget
from discod.health import Health
from discod.io import Io
from discod.wire import align_up
from discod.wire.sizes import format_size

GROW_STEP_BYTES = 256 << 20
GROW_STEP_MAX_BYTES = 1 << 30
"""The file doubles between the two: few calls, long extents, little held that is not needed."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ScratchFull(Exception):
    """The file cannot grow: the disk or the quota has no room. ``errno`` is the disk's, or 0."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.errno = code


class Unopened(OSError):
    """The file could not be opened for that, when it was adopted; nothing was tried now."""


class ScratchFile:
    """An open scratch file.

    Args:
        fd: The file, open for reading and writing; closed by :meth:`close`.
        directory: Where it is, for messages.
        direct: Whether ``fd`` is O_DIRECT.
        quota: The scratch bytes of all clients.
        io: The system calls.
        health: The directory's.
        broken: Why it is not open for writing (``O_RDWR``), or not even for reading (``O_RDONLY``).
    """

    def __init__(
        self,
        fd: int,
        directory: str,
        direct: bool,
        quota: Budget,
        io: Io | None = None,
        health: Health | None = None,
        broken: Mapping[int, OSError] | None = None,
    ) -> None:
        self.fd = fd
        self.directory = directory
        self.direct = direct
        self.health = health or Health()
        self._broken = broken or {}
        self._quota = quota
        self._io = io or Io()
        self._lock = threading.Lock()
        self._writes = 0
        self._version = 0
        status = os.fstat(fd)
        self.inode = (status.st_dev, status.st_ino)
        self._allocated_bytes = max(align_up(status.st_size), align_up(status.st_blocks * 512))
        quota.reserve_over(self._allocated_bytes)

    @property
    def allocated_bytes(self) -> int:
        """What the file occupies or has reserved, all of it counted in the quota."""
        return self._allocated_bytes

    def begin_write(self, end: int) -> None:
        """Hold the file, grown to ``end``, for a write; :meth:`end_write` must follow.

        Raises:
            ScratchFull: It cannot grow; nothing is reserved.
            OSError: The file system failed.
        """
        self.check_open(os.O_RDWR)
        with self._lock:
            if end > self._allocated_bytes:
                self._grow(end)
            self._writes += 1

    def end_write(self) -> None:
        """Undo :meth:`begin_write`."""
        with self._lock:
            self._writes -= 1

    def check_open(self, way: int) -> None:
        """Raise :class:`Unopened` if it is not open for ``O_RDWR``, or for ``O_RDONLY``."""
        error = self._broken.get(way)
        if error is not None:
            raise Unopened(error.errno, error.strerror)

    def keep(self) -> int:
        """Void every trim decided before. Returns the version to give to :meth:`trim`."""
        self._version += 1
        return self._version

    def trim(self, size_bytes: int, version: int) -> None:
        """Truncate to ``size_bytes``, unless the file was written to since ``version``."""
        with self._lock:
            freed = self._allocated_bytes - size_bytes
            if version != self._version or self._writes or freed <= 0 or self._broken:
                return
            os.ftruncate(self.fd, size_bytes)
            self._allocated_bytes = size_bytes
            self._quota.release(freed)

    def close(self, *, discard: bool) -> None:
        """Close the file and give its quota back.

        Args:
            discard: Free its space now, even if someone still holds an fd of it.
        """
        try:
            if discard and not self._broken:
                os.ftruncate(self.fd, 0)
        finally:
            os.close(self.fd)
            self._quota.release(self._allocated_bytes)
            self._allocated_bytes = 0

    def _grow(self, end: int) -> None:
        need = align_up(end) - self._allocated_bytes
        step = min(max(self._allocated_bytes, GROW_STEP_BYTES), GROW_STEP_MAX_BYTES)
        if step > need and self._try_grow(step) is None:
            return
        failure = self._try_grow(need)
        if failure is not None:
            raise failure

    def _try_grow(self, more_bytes: int) -> ScratchFull | None:
        """Grow, or say why not: no room is the one failure that a smaller step may not have."""
        if not self._quota.reserve(more_bytes):
            return self._full("the quota is used up", 0, more_bytes)
        start = self._allocated_bytes
        try:
            try:
                self._io.fallocate(self.fd, start, more_bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                os.ftruncate(self.fd, start + more_bytes)
        except OSError as error:
            try:
                # The file system keeps the part that it could reserve; nobody else may before.
                os.ftruncate(self.fd, start)
            finally:
                self._quota.release(more_bytes)
            if error.errno not in _NO_ROOM:
                raise
            return self._full(os.strerror(error.errno), error.errno, more_bytes)
        self._allocated_bytes = start + more_bytes
        return None

    def _full(self, reason: str, code: int, more_bytes: int) -> ScratchFull:
        quota = self._quota
        free = os.statvfs(self.fd)
        return ScratchFull(
            f"scratch {self.directory} has no room for {format_size(more_bytes)} more ({reason}): "
            f"{format_size(quota.used_bytes)} of the quota of {format_size(quota.limit_bytes)} are "
            f"used, and the file system has {format_size(free.f_bavail * free.f_frsize)} free. "
            "Free some space there, or raise --disk (DISCOD_DISK)",
            code,
        )
