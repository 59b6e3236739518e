"""Runs the parts, each in a process of its own under a time limit, and gathers their rows."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.bench import Row, left_out
from tests.helpers import nursery

LIMITS_SECONDS = {
    "equality": 70,
    "faults": 60,
    "races": 60,
    "pinning": 30,
    "memory": 40,
    "step": 70,
    "staging": 45,
    "graphs": 40,
    "longest": 80,
}
"""Each part, in the order to run them, and what it may take: some twice what it should on a GPU."""

CPU_PATIENCE = 4
"""Times as long: the tiny form takes seconds, but on machines that run other tests too."""

GPU_ONLY = {"pinning", "graphs"}
DETERMINISTIC = {"equality", "pinning", "faults", "graphs"}
"""Run with cuBLAS workspaces of a fixed size, without which it may add in any order."""

COMMAND = ("-m", "tests.gpu.part")
"""And a part's name and settings."""

GROUP_SECONDS = 2.0
"""For what was killed; in containers whose first process reaps nothing it is there for ever."""

TAIL_CHARS = 300
"""Of the last line that a part which failed has written: the exception's, most often."""

Line = dict[str, Any]
"""A row, and the ``part`` that it is of."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        out: For files that stay.
        scratch: For files of the run, on the disk to use.
        sockets: Another place for files of the run, whose path is short.
        seconds: For all parts together; those that have no time left are not run.
        jobs: How many parts at a time.
    """

    parts: Sequence[str]
    device: str
    quick: bool
    out: Path
    scratch: Path
    sockets: Path
    seconds: float
    jobs: int


def run(
    plan: Plan,
    show: Callable[[Line], None],
    save: Callable[[list[Line]], None] = lambda lines: None,
) -> list[Line]:
    """All rows, in the parts' order.

    What a signal handler raises ends the running parts, and goes on when they have ended.

    Args:
        plan: What to run.
        show: Is given each row as soon as it is there.
        save: Is given all rows so far, each time that a part has ended.
    """
    deadline = time.monotonic() + plan.seconds
    processes = _Processes()
    with ThreadPoolExecutor(plan.jobs) as pool:
        parts = [
            pool.submit(_run_part, plan, part, deadline, show, processes) for part in plan.parts
        ]
        try:
            for _ in as_completed(parts):
                save(_rows(parts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            wait(parts)
            save(_rows(parts))
            raise
    return _rows(parts)


def _rows(parts: Sequence[Future[list[Line]]]) -> list[Line]:
    ended = [part for part in parts if part.done() and not part.cancelled()]
    return [line for part in ended for line in part.result()]


def _run_part(
    plan: Plan, part: str, deadline: float, show: Callable[[Line], None], processes: "_Processes"
) -> list[Line]:
    lines: list[Line] = []

    def add(**row: Any) -> None:
        lines.append({"part": part, **asdict(Row(**row))})
        show(lines[-1])

    on_gpu = plan.device.startswith("cuda")
    if part in GPU_ONLY and not on_gpu:
        add(**asdict(left_out("all of it", "needs a GPU")))
        return lines
    own_limit = LIMITS_SECONDS[part] * (1 if on_gpu else CPU_PATIENCE)
    limit = min(own_limit, deadline - time.monotonic())
    if limit <= 0:
        value = f"not run: the {plan.seconds:.0f} s were over"
        add(what="all of it", value=value, goal="runs", ok=False)
        return lines
    began = time.monotonic()
    log_path = plan.out / f"{part}.log"
    with log_path.open("w") as log, _Process(plan, part, log, limit, processes) as process:
        for text in process.lines():
            add(**json.loads(text))
        code = process.wait()
    if processes.ended:
        add(what="end", value="interrupted", goal="runs", ok=False)
    elif process.timed_out:
        value, goal = f"ended after {limit:.0f} s", f"<= {limit:.0f} s"
        add(what="time limit", value=value, goal=goal, ok=False)
    elif code or not lines:
        said = log_path.read_text().strip().rpartition("\n")[2][-TAIL_CHARS:]
        value = f"exit code {code}, {len(lines)} rows: {said}"
        add(what="end", value=value, goal="exit code 0", ok=False)
    add(what="time", value=f"{time.monotonic() - began:.1f} s")
    return lines


class _Processes:
    """Those of the parts that run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Process] = set()
        self.ended = False

    def start(self, process: "_Process") -> None:
        """Start it, unless all were ended."""
        with self._lock:
            if not self.ended:
                process.start()
                self._running.add(process)

    def forget(self, process: "_Process") -> None:
        """It has ended, so that its number may be another's."""
        with self._lock:
            self._running.discard(process)

    def end(self) -> None:
        """End all that run; no more are started."""
        with self._lock:
            self.ended = True
            for process in self._running:
                process.kill()


class _Process:
    """A part's process, with its daemons and trainers in one process group: they end together."""

    def __init__(
        self, plan: Plan, part: str, log: Any, limit: float, processes: _Processes
    ) -> None:
        self.timed_out = False
        self._processes = processes
        self._log = log
        self._environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if part in DETERMINISTIC else {}
        settings = {
            "device": plan.device,
            "quick": plan.quick,
            "seconds": limit,
            "scratch": str(plan.scratch),
            "sockets": str(plan.sockets),
            "out": str(plan.out),
        }
        self._command = [*COMMAND, part, json.dumps(settings)]
        # Only the CPU is for processes that were forked from one with torch in it.
        self._start = nursery.start if plan.device == "cpu" else nursery.start_fresh
        self._process: nursery.Process | nursery.Fresh | None = None
        self._timer = threading.Timer(limit, self._time_out)

    def start(self) -> None:
        """Start it."""
        self._process = self._start(
            *self._command,
            env=os.environ | self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> "_Process":
        self._processes.start(self)
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self.kill()
        self._processes.forget(self)
        if self._process is not None:
            self._process.wait()
            self._wait_for_group(self._process.pid)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def lines(self) -> Iterable[str]:
        """What it prints, as it comes."""
        return (self._process and self._process.stdout) or ()

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait() if self._process is not None else 0

    def kill(self) -> None:
        """SIGKILL to all of the group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _wait_for_group(self, group: int) -> None:
        """Until its daemons are gone too, which may be making files until then."""
        deadline = time.monotonic() + GROUP_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.01)

    def _time_out(self) -> None:
        self.timed_out = True
        self.kill()
