"""How much of the page cache the files of a directory hold."""

import ctypes
import os
from pathlib import Path

_CACHESTAT = 451
"""The system call's number, the same on all architectures; Linux 6.5 and later."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Statistics(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_bytes(directory: Path) -> int | None:
    """Bytes of the page cache that belong to files below ``directory``; None: it cannot be told."""
    pages = 0
    for path in directory.rglob("*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # deleted since
            continue
        try:
            whole, found = _Range(0, 0), _Statistics()
            if _libc.syscall(_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(found), 0):
                return None
            pages += found.cached
        finally:
            os.close(fd)
    return pages * os.sysconf("SC_PAGE_SIZE")
