"""What the disk can do without discod: fio, and a bare probe.

fio's buffers are ordinary memory, and how contiguous that is decides much of O_DIRECT's rate, so
its figures wander between runs. The probe is the steadier reference: two threads, 8 MiB at a time,
from anonymous huge pages. Both rewrite and read one file whose extents exist already.
"""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

FIO_PACKAGE = "fio"
FIO_BLOCK_BYTES = 4 << 20
PROBE_THREADS = 2
PROBE_BLOCK_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20


class Reference(Protocol):
    """Something that writes or reads a whole file, and says how fast that was."""

    name: str

    def write(self) -> float:
        """Rewrite the file; bytes per second."""

    def read(self) -> float:
        """Read the file; bytes per second."""


class Fio:
    """``fio --ioengine=psync --direct=1``, several jobs, each on its own part of the file.

    Args:
        path: The file; made by the first :meth:`write`.
        size_bytes: Its size, rounded down to whole blocks for every job.
        jobs: Number of processes.
    """

    name = "fio"

    def __init__(self, path: Path, size_bytes: int, jobs: int) -> None:
        self._path = path
        self._job_bytes = max(1, size_bytes // jobs // FIO_BLOCK_BYTES) * FIO_BLOCK_BYTES
        self._jobs = jobs

    @staticmethod
    def version() -> str | None:
        """Its version, or None when it is not installed."""
        if shutil.which("fio") is None:
            return None
        return subprocess.run(
            ["fio", "--version"], check=True, capture_output=True, text=True
        ).stdout.strip()

    def write(self) -> float:
        return self._run("write")

    def read(self) -> float:
        return self._run("read")

    def _run(self, direction: str) -> float:
        command = [
            "fio",
            f"--name={direction}",
            f"--rw={direction}",
            f"--filename={self._path}",
            f"--bs={FIO_BLOCK_BYTES}",
            f"--size={self._job_bytes}",
            f"--offset_increment={self._job_bytes}",
            f"--numjobs={self._jobs}",
            "--ioengine=psync",
            "--direct=1",
            "--group_reporting",
            "--output-format=json",
        ]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        job = json.loads(result.stdout)["jobs"][0][direction]
        if job["io_bytes"] != self._job_bytes * self._jobs:
            raise RuntimeError(f"fio moved {job['io_bytes']} bytes, not all of the file")
        return float(job["bw_bytes"])


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

    def write(self) -> float:
        return self._run(os.pwritev)

    def read(self) -> float:
        return self._run(os.preadv)

    def close(self) -> None:
        """Close the file; whoever gave its path removes it."""
        os.close(self._fd)

    def _run(self, call: Callable[[int, list[memoryview], int], int]) -> float:
        def work(thread: int) -> None:
            buffer = self._buffers[thread]
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
