"""Runs the parts, each in a process of its own under a time limit, and gathers their rows."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

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


def run(plan: Plan, show: Callable[[Line], None]) -> list[Line]:
    """All rows, in the parts' order; each is given to ``show`` as soon as it is there."""
    deadline = time.monotonic() + plan.seconds
    with ThreadPoolExecutor(plan.jobs) as pool:
        found = pool.map(lambda part: _run_part(plan, part, deadline, show), plan.parts)
        return [line for lines in found for line in lines]


def _run_part(plan: Plan, part: str, deadline: float, show: Callable[[Line], None]) -> list[Line]:
    lines: list[Line] = []

    def add(what: str, value: str, ok: bool | None, goal: str = "", data: Any = None) -> None:
        lines.append(
            {"part": part, "what": what, "value": value, "goal": goal, "ok": ok, "data": data}
        )
        show(lines[-1])

    on_gpu = plan.device.startswith("cuda")
    if part in GPU_ONLY and not on_gpu:
        add("all of it", "left out: needs a GPU", None)
        return lines
    own_limit = LIMITS_SECONDS[part] * (1 if on_gpu else CPU_PATIENCE)
    limit = min(own_limit, deadline - time.monotonic())
    if limit <= 0:
        add("all of it", f"not run: the {plan.seconds:.0f} s were over", False, "runs")
        return lines
    began = time.monotonic()
    log_path = plan.out / f"{part}.log"
    with log_path.open("w") as log, _Process(plan, part, log, limit) as process:
        for text in process.lines():
            add(**json.loads(text))
        code = process.wait()
    if process.timed_out:
        add("time limit", f"ended after {limit:.0f} s", False, f"<= {limit:.0f} s")
    elif code:
        said = log_path.read_text().strip().rpartition("\n")[2][-TAIL_CHARS:]
        add("end", f"exit code {code}: {said}", False, "exit code 0")
    add("time", f"{time.monotonic() - began:.1f} s", None)
    return lines


class _Process:
    """A part's process, with its daemons and trainers in one process group: they end together."""

    def __init__(self, plan: Plan, part: str, log: Any, limit: float) -> None:
        self.timed_out = False
        settings = {
            "device": plan.device,
            "quick": plan.quick,
            "seconds": limit,
            "scratch": str(plan.scratch),
            "sockets": str(plan.sockets),
            "out": str(plan.out),
        }
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if part in DETERMINISTIC else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.part", part, json.dumps(settings)],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(limit, self._time_out)

    def __enter__(self) -> "_Process":
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def lines(self) -> Sequence[str]:
        """What it prints, as it comes."""
        return self._process.stdout  # type: ignore[return-value]  # iterated line by line

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait()

    def _time_out(self) -> None:
        self.timed_out = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
