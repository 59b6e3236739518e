"""What the kernel, or the sandbox around it, lets a process do; each thing is tried."""

import ctypes
import errno
import fcntl
import os
import platform
import socket
from collections.abc import Callable, Iterator

from discod.checkup.finding import Finding, fail, ok, warn
from discod.syscalls import fallocate, map_shared, unmap
from discod.wire import LEAST_ARENA_BYTES

# Linux constants that Python 3.11 lacks (fcntl.h, mman.h, socket.h).
_F_ADD_SEALS = 1033
_SEAL_SHRINK_GROW = 0x2 | 0x4
_MADV_COLLAPSE = 25
_SO_PEERPIDFD = 77

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def check_kernel() -> Iterator[Finding]:
    """The findings."""
    yield ok("kernel", f"{platform.system()} {platform.release()} on {platform.machine()}")
    yield from _arena()
    yield _pidfd()
    yield _unix_sockets()


def _arena() -> Iterator[Finding]:
    """A small arena, made as a client makes its own."""
    check = "memfd"
    try:
        fd = os.memfd_create("discod-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield fail(check, f"none can be made: {error.strerror}", _SANDBOX)
        return
    try:
        os.ftruncate(fd, LEAST_ARENA_BYTES)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK_GROW)
        fallocate(fd, 0, LEAST_ARENA_BYTES)
    except OSError as error:
        remedy = "free memory" if error.errno == errno.ENOSPC else _SANDBOX
        yield fail(check, f"an arena of 2 MiB cannot be made: {error.strerror}", remedy)
        return
    else:
        yield ok(check, "can be sealed and backed with memory")
        yield _huge_pages(fd)
    finally:
        os.close(fd)


_SANDBOX = "use a container runtime, or a seccomp profile, that allows it; or a newer kernel"


def _huge_pages(fd: int) -> Finding:
    check = "huge pages"
    address = map_shared(fd, LEAST_ARENA_BYTES)
    try:
        failed = _libc.madvise(address, LEAST_ARENA_BYTES, _MADV_COLLAPSE)
        reason = os.strerror(ctypes.get_errno()) if failed else ""
    finally:
        unmap(address, LEAST_ARENA_BYTES)
    if failed:
        return warn(
            check,
            f"MADV_COLLAPSE: {reason}; arenas are in 4 KiB pages, with which large I/O reached 0.7 "
            "of the disk's rate",
            "use Linux 6.1 or later, and leave memory free for huge pages",
        )
    return ok(check, "MADV_COLLAPSE gathers an arena into them")


def _pidfd() -> Finding:
    check = "pidfd"
    own = _tried(lambda: os.pidfd_open(os.getpid()))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        peer = _tried(lambda: here.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    if own and peer:
        return warn(
            check,
            f"neither SO_PEERPIDFD ({peer}) nor pidfd_open ({own}): where a trainer dies and a "
            "process that it forked lives on, the trainer's memory and disk space stay taken until "
            "that one ends too",
            _SANDBOX,
        )
    if peer:
        return ok(check, f"pidfd_open works (SO_PEERPIDFD does not: {peer}; Linux 6.5 has it)")
    return ok(check, "SO_PEERPIDFD tells of a client's end")


def _unix_sockets() -> Finding:
    check = "credentials"
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        try:
            here.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError as error:
            found = f"SO_PEERCRED: {error.strerror}; the daemon cannot tell who its clients are"
            return fail(check, found, _SANDBOX)
    return ok(check, "SO_PEERCRED tells who a client is")


def _tried(make: Callable[[], int]) -> str:
    """Why it does not give an fd; empty when it does."""
    try:
        os.close(make())
    except OSError as error:
        return error.strerror or str(error)
    return ""
