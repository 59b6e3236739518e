"""One trainer for the GIL benchmark: ``python -m tests.benchmarks.offloader SETTINGS``, in JSON.

A worker. Told a :class:`Window`, its main thread runs a probe while another thread saves and loads
tensors, and it answers with a :class:`Seen`.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

import disco_client
from tests.benchmarks import axolotl_disco
from tests.benchmarks.frame import WrongBytes
from tests.benchmarks.systems import AXOLOTL
from tests.benchmarks.workers import answering

IDLE = "idle"
FULL = "full rate"
PACED = "paced"

WORK = "work"
WAKE = "wake"
WAKE_SECONDS = 1e-3
UNIT = 200
"""Additions in a unit of work: some 5 us."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is offloaded, and to where.

    Attributes:
        blobs: Tensors in a cycle.
        arena_bytes: discod's.
        folder: For Axolotl's files.
        paced_bytes_per_second: Saved and loaded, when paced.
    """

    system: str
    blob_bytes: int
    blobs: int
    arena_bytes: int
    socket_dir: str
    folder: str
    paced_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Window:
    """What to look at: ``load`` is IDLE, FULL or PACED, ``probe`` is WORK or WAKE."""

    load: str
    probe: str
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Seen:
    """What the probe has seen.

    Attributes:
        units_per_second: Pure-Python work done, by the WORK probe; 0 by the other.
        late_p50_seconds: How late the WAKE probe woke; how long a unit of the WORK probe took.
        bytes_per_second: Saved and loaded meanwhile.
        cpu_share: Of the time, how much the main thread ran.
        queued_share: How much it waited for a core. What is missing to 1 in a WORK probe is
            the GIL, or time that the hypervisor took.
    """

    units_per_second: float
    late_p50_seconds: float
    late_p99_seconds: float
    late_worst_seconds: float
    bytes_per_second: float
    cpu_share: float
    queued_share: float

    @classmethod
    def of(cls, probed: "Probed", moved_bytes: int) -> Self:
        late = sorted(probed.late)
        return cls(
            units_per_second=probed.units / probed.seconds,
            late_p50_seconds=late[len(late) // 2],
            late_p99_seconds=late[len(late) * 99 // 100],
            late_worst_seconds=late[-1],
            bytes_per_second=moved_bytes / probed.seconds,
            cpu_share=probed.cpu_seconds / probed.seconds,
            queued_share=probed.queued_seconds / probed.seconds,
        )


@dataclass(slots=True)
class Probed:
    """What a probe has measured in its thread; see :class:`Seen`."""

    late: list[float] = field(default_factory=list)
    units: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    queued_seconds: float = 0.0

    @contextmanager
    def measuring(self) -> Iterator[float]:
        """Take the thread's times of what runs inside. Gives the time of its start."""
        start = time.perf_counter()
        cpu, queued = _scheduled()
        yield start
        now_cpu, now_queued = _scheduled()
        self.cpu_seconds, self.queued_seconds = now_cpu - cpu, now_queued - queued
        self.seconds = time.perf_counter() - start


def _scheduled() -> tuple[float, float]:
    """Seconds that this thread ran, and that it was ready to run and no core was free."""
    ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran) / 1e9, int(queued) / 1e9


class Load:
    """Saves and loads on a thread of its own, until it is stopped."""

    def __init__(self, settings: Settings, manager: Any) -> None:
        self._settings = settings
        self._manager = manager
        self._prefetches = settings.system == AXOLOTL  # as its backward does
        self._tensors = [
            torch.full((settings.blob_bytes // 8,), index, dtype=torch.int64)
            for index in range(settings.blobs)
        ]
        self._stamp = 0
        self._moved_bytes = 0
        self._stop = False
        self._running = threading.Event()
        """Set when one cycle has warmed everything up, or failed."""
        self._error: BaseException | None = None

    def run(self, probe: Callable[[], Probed], rate: float | None) -> Seen:
        """``probe()`` on this thread beside the load. ``rate``: None: as fast as it goes.

        Raises:
            WrongBytes: What was loaded is not what was saved.
        """
        self._stop = False
        self._running.clear()
        thread = threading.Thread(target=self._work, args=(rate,))
        thread.start()
        self._running.wait()
        before = self._moved_bytes
        try:
            probed = probe()
            moved_bytes = self._moved_bytes - before
        finally:
            self._stop = True
            thread.join()
        if self._error is not None:
            raise self._error
        return Seen.of(probed, moved_bytes)

    def _work(self, rate: float | None) -> None:
        try:
            while not self._stop:
                self._cycle(rate)
                self._running.set()
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            self._error = error
            self._running.set()

    def _cycle(self, rate: float | None) -> None:
        due = time.monotonic()

        def moved() -> None:
            nonlocal due
            self._moved_bytes += self._settings.blob_bytes
            if rate is not None and not self._stop:
                due += self._settings.blob_bytes / rate
                time.sleep(max(0.0, due - time.monotonic()))

        handles = []
        for tensor in self._tensors:
            self._stamp += 1
            tensor[0] = tensor[-1] = self._stamp
            handles.append((self._manager.save_tensor(tensor), self._stamp))
            moved()
        while handles:
            handle, stamp = handles.pop()
            if self._prefetches:
                self._manager.trigger_prefetch()
            loaded = self._manager.load_tensor(handle)
            if loaded[0].item() != stamp or loaded[-1].item() != stamp:
                raise WrongBytes(f"blob {stamp} came back as {loaded[0].item()}")
            del loaded
            self._manager.cleanup_tensor(handle)
            moved()


def work(seconds: float) -> Probed:
    """Pure-Python work for that long; "late" is how long each unit took."""
    probed = Probed()
    with probed.measuring() as last:
        end = last + seconds
        while last < end:
            total = 0
            for number in range(UNIT):
                total += number
            now = time.perf_counter()
            probed.late.append(now - last)
            last = now
    probed.units = len(probed.late)
    return probed


def wake(seconds: float) -> Probed:
    """Wake every millisecond for that long."""
    probed = Probed()
    with probed.measuring() as due:
        end = due + seconds
        while due < end:
            due = max(due + WAKE_SECONDS, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            probed.late.append(time.perf_counter() - due)
    return probed


def make_manager(settings: Settings) -> Any:
    """Axolotl's, or discod's, which has the same methods."""
    if settings.system == AXOLOTL:
        module = axolotl_disco.load(axolotl_disco.find(), Path(settings.folder))
        return module.Disco.get_instance()
    disco_client.connect(settings.socket_dir, arena=settings.arena_bytes)
    return disco_client.DiskOffloadManager()


def main() -> None:
    """Answer windows until stdin ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    probes = {WORK: work, WAKE: wake}
    rates = {FULL: None, PACED: settings.paced_bytes_per_second}
    with answering() as answer:
        manager = make_manager(settings)
        load = Load(settings, manager)
        answer("ready")
        for line in sys.stdin:
            window = Window(**json.loads(line))

            def probe(window: Window = window) -> Probed:
                return probes[window.probe](window.seconds)

            if window.load == IDLE:
                seen = Seen.of(probe(), 0)
            else:
                seen = load.run(probe, rates[window.load])
            answer(json.dumps(asdict(seen)))
        manager.cleanup()
        disco_client.close()


if __name__ == "__main__":
    main()
