"""A client's arena, mapped into the daemon after a check that it cannot be pulled away.

The memory is the client's: what it writes there at any time can spoil its own blobs, nothing
else. Its pages are the daemon's only for I/O and checksums.
"""

import ctypes
import errno
import fcntl
import mmap
import os

from discod.syscalls import map_shared, unmap
from discod.wire import MAX_ARENA_BYTES, PAGE_BYTES

# Linux constants that Python lacks (fcntl.h).
_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4


class BadArena(Exception):
    """The fd is no arena; the text says what is wrong with it."""


def check_arena(fd: int, arena_bytes: int) -> None:
    """Raise :class:`BadArena` unless ``fd`` is a sealed memfd of exactly ``arena_bytes``.

    Without the seals the client could shrink it, and touching the lost pages kills the daemon
    (SIGBUS). Pages of hugetlbfs are refused because they can be missing in the same way.
    """
    if not 0 < arena_bytes <= MAX_ARENA_BYTES or arena_bytes % PAGE_BYTES:
        raise BadArena(f"its size of {arena_bytes} bytes is not in whole pages, or out of range")
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
        raise BadArena("it is no memfd") from error
    if seals & (_F_SEAL_SHRINK | _F_SEAL_GROW) != _F_SEAL_SHRINK | _F_SEAL_GROW:
        raise BadArena("it is not sealed against shrinking and growing")
    size_bytes = os.fstat(fd).st_size
    if size_bytes != arena_bytes:
        raise BadArena(f"it has {size_bytes} bytes, not the {arena_bytes} that were announced")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise BadArena("it is on hugetlbfs; transparent huge pages do as well")


class Mapping:
    """The mapped arena.

    Args:
        fd: The memfd, checked; it stays the caller's.
        size_bytes: Its size.

    Attributes:
        fd: One of its own, for processes that map the arena as well.

    Raises:
        OSError: It cannot be mapped.

    Notes:
        A view does not keep the memory mapped: :meth:`close` only once no job with one is left.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.dup(fd)
        try:
            self._address = map_shared(self.fd, size_bytes)
        except OSError:
            os.close(self.fd)
            raise
        pages = (ctypes.c_char * size_bytes).from_address(self._address)
        self._whole = memoryview(pages).cast("B")

    def view(self, start: int, length: int) -> memoryview:
        """The bytes at ``start``, which the caller has checked to be inside."""
        return self._whole[start : start + length]

    def close(self) -> None:
        """Unmap: slow for a large arena, since its pages may be freed with it."""
        self._whole.release()
        unmap(self._address, self.size_bytes)
        os.close(self.fd)
