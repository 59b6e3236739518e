"""The arena: this client's own shared memory, a sealed memfd mapped on a huge-page boundary.

Attaching is instant because pages are backed in steps, ahead of first use, by
:meth:`Arena.back`; running out of memory is then an error instead of a SIGBUS. Pages are kept
once they are backed. Which bytes hold what is decided in :mod:`disco_client.residency`.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import weakref

from disco_client.errors import ArenaFull
from discod.wire import BACKING_STEP_BYTES, LEAST_ARENA_BYTES
from discod.wire.sizes import format_size

HUGE_PAGE_BYTES = LEAST_ARENA_BYTES

# Linux constants that Python 3.11 lacks: fcntl.h, mman.h.
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25

_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """A shared-memory segment of a fixed size.

    Args:
        size_bytes: Wanted size; rounded up to whole huge pages (2 MiB).

    Raises:
        ArenaFull: The memfd cannot be made or mapped at that size.

    Attributes:
        address: Where it is mapped.
        backed_bytes: How much has memory behind it, from its start.
        step_bytes: How much is backed at a time.

    Notes:
        Views keep the mapping alive: :meth:`close` drops the fd and this object's own view, and
        the memory is unmapped when the last view of it is gone.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.fd = os.memfd_create("discod-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self.address, whole = _map_aligned(self.fd, self.size_bytes)
        except OSError as error:
            os.close(self.fd)
            raise ArenaFull(
                f"an arena of {format_size(self.size_bytes)} cannot be made ({_reason(error)}); "
                "set a smaller one (DISCOD_ARENA or connect(arena=...))"
            ) from error
        self.view = memoryview(whole).cast("B")
        self.backed_bytes = 0
        self.step_bytes = BACKING_STEP_BYTES
        self._collapse = True

    def back(self, end_bytes: int) -> None:
        """Have real memory behind all bytes below ``end_bytes``, in huge pages where possible.

        Raises:
            ArenaFull: The node has no memory for it; what was backed before stays usable.
        """
        while self.backed_bytes < end_bytes:
            start = self.backed_bytes
            length = min(self.step_bytes, self.size_bytes - start)
            try:
                os.posix_fallocate(self.fd, start, length)
            except OSError as error:
                raise ArenaFull(
                    f"the node has no memory for {format_size(length)} more of the arena "
                    f"({error.strerror}): {format_size(start)} of its "
                    f"{format_size(self.size_bytes)} are backed; set a smaller arena "
                    "(DISCOD_ARENA or connect(arena=...))"
                ) from error
            if self._collapse and _libc.madvise(self.address + start, length, _MADV_COLLAPSE):
                # Older kernels, or no huge page free: 4 KiB pages work, at 0.7 of the disk's rate.
                self._collapse = False
                reason = os.strerror(ctypes.get_errno())
                _log.info("the arena stays in 4 KiB pages (madvise: %s)", reason)
            self.backed_bytes = start + length

    def close(self) -> None:
        """Close the fd and drop the view; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")


def _reason(error: OSError) -> str:
    """With the limit that a memfd, which is a file too, is over."""
    if error.errno != errno.EFBIG:
        return error.strerror or str(error)
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return (
        f"{error.strerror}: this process may have no file over {format_size(limit_bytes)}, by "
        "RLIMIT_FSIZE; see ulimit -f"
    )


def _map_aligned(fd: int, size_bytes: int) -> tuple[int, "ctypes.Array[ctypes.c_char]"]:
    """Map ``fd`` on a huge-page boundary: its address, and an array that unmaps it when freed."""
    # Reserve a huge page more than needed, then map over the aligned part of the reservation.
    reserved = _mmap(None, size_bytes + HUGE_PAGE_BYTES, _PROT_NONE, reserve=True)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = reserved + size_bytes + HUGE_PAGE_BYTES
    _libc.munmap(reserved, address - reserved)
    _libc.munmap(address + size_bytes, end - address - size_bytes)
    _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, fd=fd)
    _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
    whole = (ctypes.c_char * size_bytes).from_address(address)
    unmap = weakref.finalize(whole, _libc.munmap, address, size_bytes)
    unmap.atexit = False  # the kernel does it, after everything that may still use the memory
    return address, whole


def _mmap(
    address: int | None, size_bytes: int, protection: int, *, fd: int = -1, reserve: bool = False
) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE if reserve else mmap.MAP_SHARED
    if address is not None:
        flags |= _MAP_FIXED
    result = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {size_bytes} bytes failed: {os.strerror(error)}")
    return int(result)
