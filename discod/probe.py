"""What a directory's file system can do: nameless files, O_DIRECT, and what kind it is.

For the daemon's start (:mod:`discod.storage`) and for ``discod doctor``.
"""

import contextlib
import errno
import mmap
import os
import re
import tempfile
from pathlib import Path

from discod.io import Io
from discod.wire import PAGE_BYTES

FILE_PREFIX = ".discod-"
"""Of files on file systems without O_TMPFILE, for the moment between making and unlinking."""

FILE_MODE = 0o600

IN_RAM = ("tmpfs", "ramfs")
"""File systems that are memory."""

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


class NoTmpfile(OSError):
    """The file system has no O_TMPFILE, as far as this directory tells."""


def open_tmpfile(path: Path, io: Io, direct: bool) -> int:
    """A file that never had a name, and that nobody can give one (O_EXCL).

    Raises:
        NoTmpfile: There are no such files here.
        OSError: It cannot be made, or not with O_DIRECT.
    """
    flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
    try:
        fd = io.open(path, flags | os.O_TMPFILE | os.O_EXCL, FILE_MODE)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            raise NoTmpfile(error.errno, error.strerror) from error
        raise
    os.fchmod(fd, FILE_MODE)  # whatever the umask is
    return fd


def open_nameless(path: Path, io: Io, direct: bool) -> int:
    """A nameless file; where O_TMPFILE does not work it has a name for a moment."""
    with contextlib.suppress(NoTmpfile):
        return open_tmpfile(path, io, direct)
    named, name = tempfile.mkstemp(prefix=FILE_PREFIX, dir=path)
    try:
        os.fchmod(named, FILE_MODE)
        os.unlink(name)
        flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        return io.open(f"/proc/self/fd/{named}", flags, 0)
    finally:
        os.close(named)


def write_and_read(fd: int, io: Io) -> None:
    """Write a page and read it back. Raises ``OSError`` when that does not work."""
    with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
        page[:] = wanted = b"discod" + bytes(PAGE_BYTES - 6)
        if io.pwritev(fd, [view], 0) != PAGE_BYTES:
            raise OSError(errno.EIO, "short write")
        page[:] = bytes(PAGE_BYTES)
        if io.preadv(fd, [view], 0) != PAGE_BYTES or page[:] != wanted:
            raise OSError(errno.EIO, "short or wrong read")


def fs_type_of(path: Path) -> str:
    """The type of the file system that ``path`` is on, as /proc/self/mountinfo has it.

    By mount point: the device numbers there are not those of stat(2) for btrfs or overlayfs.
    """
    fs_type, longest = "unknown file system", -1
    with contextlib.suppress(OSError, ValueError, IndexError):
        real = path.resolve()
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount_point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), line.split()[4])
            # Of several on one point the last hides the others.
            if real.is_relative_to(mount_point) and len(mount_point) >= longest:
                fs_type, longest = line.split(" - ", 1)[1].split()[0], len(mount_point)
    return fs_type
