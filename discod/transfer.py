"""What one piece of a job does: move bytes between the arena and a scratch file.

No byte passes through Python: the kernel reads and writes the mapped arena itself. Short reads
and writes are looped; one that makes no progress is an error.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from discod import checksum
from discod.io import Io
from discod.scratch_file import ScratchFile
from discod.wire import PAGE_BYTES


class Corrupt(Exception):
    """What was read does not have the checksum that was taken when it was written."""


class Short(OSError):
    """A call has moved nothing on. A read's: its end is beyond that of the file."""


class OutOfUse(Exception):
    """The directory went out of use before this piece was written."""


def _whole(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    data: memoryview,
    offset: int,
) -> None:
    """Call until all of ``data`` is transferred; raises ``OSError`` when nothing moves on."""
    done = 0
    while done < len(data):
        moved = call(fd, [data[done:]], offset + done)
        # O_DIRECT goes on only from an aligned position: a part of a page is done again.
        progress = moved - (done + moved) % PAGE_BYTES if done + moved < len(data) else moved
        if progress <= 0:
            raise Short(
                errno.EIO,
                f"{os.strerror(errno.EIO)}: {done + moved} of {len(data)} bytes transferred",
            )
        done += progress


def _drop_pages(fd: int, offset: int, length: int) -> None:
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class WriteBlob:
    """Write ``data`` to ``file`` at ``offset``; the result is its checksum's token.

    ``mode`` and ``step_bytes`` are as for :func:`discod.checksum.take`; ``refused`` is asked before
    each piece whether to raise :class:`OutOfUse` instead.
    """

    file: ScratchFile
    offset: int
    data: memoryview
    mode: checksum.Mode
    step_bytes: int = checksum.SAMPLE_STEP_BYTES
    refused: Callable[[], bool] = _never

    def run(self, io: Io, start: int, length: int) -> None:
        if self.refused():
            raise OutOfUse
        offset = self.offset + start
        with self.file.writing(self.offset + len(self.data)):
            _whole(io.pwritev, self.file.fd, self.data[start : start + length], offset)
            if not self.file.direct:
                io.write_back(self.file.fd, offset, length)
                _drop_pages(self.file.fd, offset, length)

    def complete(self) -> bytes:
        return checksum.take(self.mode, self.data, self.step_bytes)


@dataclass(frozen=True, slots=True)
class ReadBlob:
    """Read ``data`` from ``file`` at ``offset`` and verify it against ``token``."""

    file: ScratchFile
    offset: int
    data: memoryview
    token: bytes

    def run(self, io: Io, start: int, length: int) -> None:
        self.file.check_open(os.O_RDONLY)
        offset = self.offset + start
        _whole(io.preadv, self.file.fd, self.data[start : start + length], offset)
        if not self.file.direct:
            _drop_pages(self.file.fd, offset, length)

    def complete(self) -> bytes:
        if not checksum.matches(self.token, self.data):
            raise Corrupt
        return b""
