"""What the disk can do without discod: fio, and a bare probe.

fio's buffers are ordinary memory, and how contiguous that is decides much of O_DIRECT's rate, so
its figures wander between runs. The probe is the steadier reference: two threads, 8 MiB at a time,
from anonymous huge pages. Both rewrite and read one file whose extents exist already.
"""

import ctypes
import json
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

FIO_FORMS = ((4, 4 << 20), (2, 8 << 20), (4, 16 << 20))
"""Jobs and block sizes, those that were best on some disk."""
PROBE_THREADS = 2
PROBE_BLOCK_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20


class Reference(Protocol):
    """Something that writes or reads a whole file, and says how fast that was."""

    name: str

    def run(self, direction: str) -> float:
        """``write``, ``read`` or ``mixed`` (half of each, at once); bytes per second."""


class Fio:
    """``fio --ioengine=psync --direct=1``, in the best of :data:`FIO_FORMS` for each direction.

    Args:
        path: The file; made here.
        size_bytes: Its size, rounded down to whole blocks for every job.
    """

    name = "fio"

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._run("write", *FIO_FORMS[0])  # which makes the extents
        self.forms: dict[str, tuple[int, int]] = {}
        """Jobs and block size, by direction."""
        for direction in ("write", "read"):
            rates = {form: self._run(direction, *form) for form in FIO_FORMS}
            self.forms[direction] = max(rates, key=lambda form: rates[form])
        self.forms["mixed"] = self.forms["write"]

    def run(self, direction: str) -> float:
        return self._run(direction, *self.forms[direction])

    def _run(self, direction: str, jobs: int, block_bytes: int) -> float:
        job_bytes = max(1, self._size_bytes // jobs // block_bytes) * block_bytes
        command = [
            "fio",
            f"--name={direction}",
            f"--rw={'rw' if direction == 'mixed' else direction}",
            f"--filename={self._path}",
            f"--bs={block_bytes}",
            f"--size={job_bytes}",
            f"--offset_increment={job_bytes}",
            f"--numjobs={jobs}",
            "--ioengine=psync",
            "--direct=1",
            "--group_reporting",
            "--output-format=json",
        ]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        job = json.loads(result.stdout)["jobs"][0]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        if moved != job_bytes * jobs:
            raise RuntimeError(f"fio moved {moved} bytes, not all of the file")
        milliseconds = max(job["read"]["runtime"], job["write"]["runtime"])
        return float(moved / (milliseconds / 1e3))


class Probe:
    """Two threads with ``pwritev`` and ``preadv``, O_DIRECT, from anonymous huge pages.

    Args:
        path: The file; made here.
        size_bytes: Its size, rounded down to whole blocks.
    """

    name = "probe"

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._blocks = max(PROBE_THREADS, size_bytes // PROBE_BLOCK_BYTES)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, self._blocks * PROBE_BLOCK_BYTES)
        self._buffers = [_huge_buffer(PROBE_BLOCK_BYTES) for _ in range(PROBE_THREADS)]

    def run(self, direction: str) -> float:
        calls = {
            "write": (os.pwritev, os.pwritev),
            "read": (os.preadv, os.preadv),
            "mixed": (os.pwritev, os.preadv),
        }[direction]
        return self._run(calls)

    def close(self) -> None:
        """Close the file; whoever gave its path removes it."""
        os.close(self._fd)

    def _run(self, calls: Sequence[Callable[[int, list[memoryview], int], int]]) -> float:
        def work(thread: int) -> None:
            buffer, call = self._buffers[thread], calls[thread]
            for block in range(thread, self._blocks, PROBE_THREADS):
                moved = call(self._fd, [buffer], block * PROBE_BLOCK_BYTES)
                if moved != PROBE_BLOCK_BYTES:
                    raise RuntimeError(f"short I/O: {moved} bytes")

        start = time.perf_counter()
        with ThreadPoolExecutor(PROBE_THREADS) as pool:
            list(pool.map(work, range(PROBE_THREADS)))
        return self._blocks * PROBE_BLOCK_BYTES / (time.perf_counter() - start)


def _huge_buffer(size_bytes: int) -> memoryview:
    """Touched anonymous memory on a huge-page boundary, in huge pages where the kernel allows."""
    mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    skip = -address % HUGE_PAGE_BYTES
    buffer = memoryview(mapping)[skip : skip + size_bytes]
    buffer[:] = os.urandom(1 << 20) * (size_bytes >> 20)
    return buffer


class BareReads:
    """Reads of one size from a file, O_DIRECT, into huge pages, a call for each 8 MiB.

    Args:
        path: The file; made here, and removed at the end of the context.
        size_bytes: Of each read; rounded up to whole pages.
    """

    PIECES = 32

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = -(-size_bytes // 4096) * 4096
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        self._buffer = _huge_buffer(max(self._size_bytes, 1 << 20))
        for number in range(self.PIECES):
            self._each(os.pwritev, number)

    def __enter__(self) -> "BareReads":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self._path.unlink()

    def read(self, number: int) -> None:
        """Read the piece with this number, one of ``PIECES``."""
        self._each(os.preadv, number % self.PIECES)

    def _each(self, call: Callable[[int, list[memoryview], int], int], number: int) -> None:
        for at in range(0, self._size_bytes, PROBE_BLOCK_BYTES):
            piece = self._buffer[at : min(at + PROBE_BLOCK_BYTES, self._size_bytes)]
            if call(self._fd, [piece], number * self._size_bytes + at) != len(piece):
                raise RuntimeError("short I/O")
