"""Cycles of saves and loads through the client's API, timed and checked."""

import time
from dataclasses import dataclass, field

import psutil
import torch

import disco_client
from disco_client.arena import Arena
from disco_client.stats import Counters
from discod.wire import align_up


class WrongBytes(Exception):
    """The benchmark's data or byte counts are wrong: its figures would mean nothing."""


@dataclass(slots=True)
class Phase:
    """One phase of one cycle: bytes that the disk moved, wall time, and the daemon's CPU time."""

    disk_bytes: int
    seconds: float
    daemon_cpu_seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.disk_bytes / self.seconds


@dataclass(slots=True)
class CallTimes:
    """Seconds of single calls on the caller's thread, without waits for the disk.

    The CPU time of the thread tells the call's own cost from being moved aside by the processes
    that it wakes, of which there is much when no core is free.
    """

    save: list[float] = field(default_factory=list)
    save_cpu: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    """A plain ``copy_`` of the same bytes into warm memory of the arena's kind."""
    memcpy_cpu: list[float] = field(default_factory=list)
    load_hit: list[float] = field(default_factory=list)


class Cycles:
    """Saves ``blobs`` tensors, all different, then loads and releases them newest first.

    This process must be attached to the daemon ``daemon_pid``, with an arena of ``arena_bytes``.
    """

    def __init__(self, blob_bytes: int, blobs: int, arena_bytes: int, daemon_pid: int) -> None:
        self._blob_bytes = blob_bytes
        self._blobs = blobs
        self._daemon = psutil.Process(daemon_pid)
        generator = torch.Generator().manual_seed(0)
        self._source = torch.randint(
            -(1 << 62), 1 << 62, (blob_bytes // 8,), generator=generator, dtype=torch.int64
        )
        self._arena = Arena(arena_bytes)
        self._arena.back(arena_bytes)
        self._targets = [
            torch.frombuffer(self._arena.view, dtype=torch.int64, count=blob_bytes // 8, offset=at)
            for at in range(0, arena_bytes - blob_bytes + 1, blob_bytes)
        ]
        for target in self._targets:
            target.copy_(self._source)
        self._manager = disco_client.DiskOffloadManager()
        self._handles: list[disco_client.BlobHandle] = []

    def close(self) -> None:
        """Release everything."""
        self._manager.cleanup()
        self._targets.clear()
        self._arena.close()

    def write(self) -> Phase:
        """Save all blobs as fast as it goes, until no write is under way."""
        before = disco_client.stats()
        cpu, start = self._cpu_seconds(), time.perf_counter()
        for index in range(self._blobs):
            self._stamp(index)
            self._handles.append(self._manager.save_tensor(self._source))
        for handle in self._handles:
            self._manager.wait_for_save(handle)
        seconds = time.perf_counter() - start
        written_bytes = disco_client.stats().written_bytes - before.written_bytes
        return Phase(written_bytes, seconds, self._cpu_seconds() - cpu)

    def read(self, *, check_all: bool = False) -> Phase:
        """Load all blobs, newest first, and release each; the cycle ends with the last one."""
        before = disco_client.stats()
        cpu, start = self._cpu_seconds(), time.perf_counter()
        for index in reversed(range(self._blobs)):
            tensor = self._manager.load_tensor(self._handles[index])
            if tensor[0].item() != index or tensor[-1].item() != index:
                raise WrongBytes(f"blob {index} came back as {tensor[0].item()}")
            if check_all:
                self._stamp(index)
                if not torch.equal(tensor, self._source):
                    raise WrongBytes(f"blob {index} came back different")
            del tensor
            self._manager.cleanup_tensor(self._handles.pop())
        seconds = time.perf_counter() - start
        stats = disco_client.stats()
        self._check(stats.last_cycle)
        return Phase(stats.read_bytes - before.read_bytes, seconds, self._cpu_seconds() - cpu)

    def time_calls(self, times: CallTimes) -> None:
        """A cycle at a trainer's pace: each save's write is over before the next save begins."""
        for index in range(self._blobs):
            self._stamp(index)
            if index % 2:  # in turns, because the second one finds the source in the cache
                self._time_memcpy(index, times)
            start, cpu = time.perf_counter(), time.thread_time()
            self._handles.append(self._manager.save_tensor(self._source))
            times.save_cpu.append(time.thread_time() - cpu)
            times.save.append(time.perf_counter() - start)
            self._manager.wait_for_save(self._handles[-1])
            if not index % 2:
                self._time_memcpy(index, times)
        start = time.perf_counter()
        tensor = self._manager.load_tensor(self._handles[-1])
        times.load_hit.append(time.perf_counter() - start)
        del tensor
        self.read()

    def _time_memcpy(self, index: int, times: CallTimes) -> None:
        target = self._targets[index % len(self._targets)]
        start, cpu = time.perf_counter(), time.thread_time()
        target.copy_(self._source)
        times.memcpy_cpu.append(time.thread_time() - cpu)
        times.memcpy.append(time.perf_counter() - start)

    def _stamp(self, index: int) -> None:
        self._source[0] = self._source[-1] = index

    def _cpu_seconds(self) -> float:
        times = self._daemon.cpu_times()
        return float(times.user + times.system)

    def _check(self, cycle: Counters) -> None:
        """Every byte was saved once, and either written or never; what was read was written."""
        saved_bytes = self._blobs * align_up(self._blob_bytes)
        if cycle.saved_bytes != saved_bytes:
            raise WrongBytes(f"{cycle.saved_bytes} bytes saved, not {saved_bytes}")
        if cycle.written_bytes + cycle.elided_bytes != saved_bytes:
            raise WrongBytes(
                f"{cycle.written_bytes} bytes written and {cycle.elided_bytes} not, "
                f"of {saved_bytes}"
            )
        if not 0 < cycle.read_bytes <= cycle.written_bytes:
            raise WrongBytes(
                f"{cycle.read_bytes} bytes read back, of {cycle.written_bytes} written"
            )
