"""Cycles of saves and loads through the client's API, timed and checked, in this process."""

import time
from dataclasses import dataclass

import torch

import disco_client
from disco_client.stats import Counters
from discod.wire import align_up
from tests.benchmarks.frame import WrongBytes


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of one cycle.

    Attributes:
        written_bytes, read_bytes: What the disk moved.
        began, ended: By the monotonic clock, which all processes share.
        cpu_seconds: Of this process.
        waited_seconds: In saves and loads, for room and for reads.
    """

    written_bytes: int
    read_bytes: int
    began: float
    ended: float
    cpu_seconds: float
    waited_seconds: float


class Cycles:
    """Saves ``blobs`` tensors, all different, then loads and releases them newest first.

    This process must be attached.
    """

    def __init__(self, blob_bytes: int, blobs: int) -> None:
        self._blob_bytes = blob_bytes
        self._blobs = blobs
        generator = torch.Generator().manual_seed(0)
        self._source = torch.randint(
            -(1 << 62), 1 << 62, (blob_bytes // 8,), generator=generator, dtype=torch.int64
        )
        self._manager = disco_client.DiskOffloadManager(prefetch_size=1 << 20, save_workers=1 << 20)
        self._handles: list[disco_client.BlobHandle] = []
        self._number = 0
        self._first = 0

    def close(self) -> None:
        """Release everything."""
        self._manager.cleanup()
        self._handles.clear()

    def write(self) -> Phase:
        """Save all blobs as fast as it goes, until no write is under way."""
        before = _Before()
        self._first = self._number
        for _ in range(self._blobs):
            self._handles.append(self._save())
        self._wait()
        return before.phase()

    def read(self, *, check_all: bool = False) -> Phase:
        """Load all blobs, newest first, and release each; the cycle ends with the last one."""
        before = _Before()
        for index in reversed(range(self._blobs)):
            self._load(self._handles.pop(), self._first + index, check_all)
        self._check(disco_client.stats().last_cycle)
        return before.phase()

    def mixed(self) -> Phase:
        """After :meth:`write`: load and release each blob, oldest first, and save another one.

        The blobs that are there in the end take the place of those before.
        """
        before = _Before()
        first, self._first = self._first, self._number
        for index in range(self._blobs):
            self._load(self._handles[index], first + index, check_all=False)
            self._handles[index] = self._save()
        self._wait()
        return before.phase()

    def drop(self) -> None:
        """Release all blobs unread, as a cycle that fails does."""
        self._handles.clear()

    def _save(self) -> disco_client.BlobHandle:
        self._source[0] = self._source[-1] = self._number
        self._number += 1
        return self._manager.save_tensor(self._source)

    def _load(self, handle: disco_client.BlobHandle, number: int, check_all: bool) -> None:
        tensor = self._manager.load_tensor(handle)
        if tensor[0].item() != number or tensor[-1].item() != number:
            raise WrongBytes(f"blob {number} came back as {tensor[0].item()}")
        if check_all:
            self._source[0] = self._source[-1] = number
            if not torch.equal(tensor, self._source):
                raise WrongBytes(f"blob {number} came back different")
        del tensor
        self._manager.cleanup_tensor(handle)

    def _wait(self) -> None:
        for handle in self._handles:
            self._manager.wait_for_save(handle)

    def _check(self, cycle: Counters) -> None:
        """Every byte was saved, and either written or never; what was read was written."""
        each = align_up(self._blob_bytes)
        if cycle.saved_bytes % (self._blobs * each) or not cycle.saved_bytes:
            raise WrongBytes(f"{cycle.saved_bytes} bytes saved, of {self._blobs} times {each}")
        if cycle.written_bytes + cycle.elided_bytes != cycle.saved_bytes:
            raise WrongBytes(
                f"{cycle.written_bytes} bytes written and {cycle.elided_bytes} not, "
                f"of {cycle.saved_bytes}"
            )
        if not cycle.read_bytes > 0:
            raise WrongBytes("nothing was read back")


class _Before:
    """The counters before a phase."""

    def __init__(self) -> None:
        self._stats = disco_client.stats()
        self._cpu = time.process_time()
        self._began = time.monotonic()

    def phase(self) -> Phase:
        ended = time.monotonic()
        now, was = disco_client.stats(), self._stats
        return Phase(
            now.written_bytes - was.written_bytes,
            now.read_bytes - was.read_bytes,
            self._began,
            ended,
            time.process_time() - self._cpu,
            now.save_wait_seconds
            - was.save_wait_seconds
            + now.load_wait_seconds
            - was.load_wait_seconds,
        )
