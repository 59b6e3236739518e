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
    """A call has moved nothing on."""


class PastTheEnd(OSError):
    """A read beyond the end of the file: nobody has written there, or it was cut off."""


class OutOfUse(Exception):
    """The directory went out of use before this piece was written."""


def _whole(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> None:
    """Call until all of ``buffers`` is transferred; raises ``OSError`` when nothing moves on."""
    size = sum(map(len, buffers))
    done = 0
    while done < size:
        moved = call(fd, buffers, offset + done)
        # O_DIRECT goes on only from an aligned position: a part of a page is done again.
        progress = moved - (done + moved) % PAGE_BYTES if done + moved < size else moved
        if progress <= 0:
            raise Short(
                errno.EIO,
                f"{os.strerror(errno.EIO)}: {done + moved} of {size} bytes transferred",
            )
        done += progress
        if done < size:
            buffers = _behind(buffers, progress)


def _behind(buffers: Sequence[memoryview], length: int) -> Sequence[memoryview]:
    """What is left of ``buffers`` without their first ``length`` bytes, fewer than all."""
    for number, buffer in enumerate(buffers):
        if length < len(buffer):
            return [buffer[length:], *buffers[number + 1 :]]
        length -= len(buffer)
    return []


def _side_by_side(blobs: "Sequence[WriteBlob | ReadBlob]") -> tuple[int, list[memoryview]]:
    """Where blobs begin whose extents touch, and their buffers in the order of the file."""
    blobs = sorted(blobs, key=lambda blob: blob.offset)
    return blobs[0].offset, [blob.data for blob in blobs]


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
        self._write(io, self.offset + start, [self.data[start : start + length]])

    def run_with(self, io: Io, others: Sequence["WriteBlob"]) -> None:
        offset, buffers = _side_by_side([self, *others])
        self._write(io, offset, buffers)

    def _write(self, io: Io, offset: int, buffers: Sequence[memoryview]) -> None:
        if self.refused():
            raise OutOfUse
        length = sum(map(len, buffers))
        self.file.begin_write(max(offset + length, self.offset + len(self.data)))
        try:
            _whole(io.pwritev, self.file.fd, buffers, offset)
            if not self.file.direct:
                io.write_back(self.file.fd, offset, length)
                _drop_pages(self.file.fd, offset, length)
        finally:
            self.file.end_write()

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
        self._read(io, self.offset + start, [self.data[start : start + length]])

    def run_with(self, io: Io, others: Sequence["ReadBlob"]) -> None:
        offset, buffers = _side_by_side([self, *others])
        self._read(io, offset, buffers)

    def _read(self, io: Io, offset: int, buffers: Sequence[memoryview]) -> None:
        self.file.check_open(os.O_RDONLY)
        try:
            _whole(io.preadv, self.file.fd, buffers, offset)
        except Short as error:
            size = os.fstat(self.file.fd).st_size
            if offset + sum(map(len, buffers)) > size:
                raise PastTheEnd(errno.EIO, f"the file ends at {size}") from error
            raise
        if not self.file.direct:
            _drop_pages(self.file.fd, offset, sum(map(len, buffers)))

    def complete(self) -> bytes:
        if not checksum.matches(self.token, self.data):
            raise Corrupt
        return b""
