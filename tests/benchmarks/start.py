"""Start: what importing, attaching and starting a daemon take, and what an idle daemon keeps."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions
from tests.benchmarks.page import table
from tests.benchmarks.service import service
from tests.benchmarks.spread import show, spread
from tests.helpers.daemon import Daemon
from tests.helpers.jobs import ROOT

GOAL_START_SECONDS = 0.3
GOAL_RESIDENT_BYTES = 45e6

_IMPORT = (
    "import time; began = time.perf_counter(); import torch; between = time.perf_counter(); "
    "import disco_client; print(between - began, time.perf_counter() - between)"
)
_ATTACH = (
    "import sys, time, torch, disco_client; began = time.perf_counter(); "
    "disco_client.connect(sys.argv[1], arena=sys.argv[2]); between = time.perf_counter(); "
    "disco_client.close(); print(between - began, time.perf_counter() - between)"
)


class Start:
    """See the module's text."""

    name = "start"
    title = "Start: import, attach, daemon"

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        return measure(10 if options.full else 3, options.directory, progress)

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        start, resident = result["daemon_start"]["median"], result["resident_bytes"]["median"]
        return [
            Goal(
                f"daemon ready at most {GOAL_START_SECONDS} s after its start",
                f"{start:.2f} s",
                start <= GOAL_START_SECONDS,
            ),
            Goal(
                f"daemon resident at most {GOAL_RESIDENT_BYTES / 1e6:.0f} MB when idle",
                f"{resident / 1e6:.1f} MB",
                resident <= GOAL_RESIDENT_BYTES,
            ),
        ]

    def markdown(self, result: dict[str, Any]) -> str:
        rows = [
            ["import torch, in a new process", f"{show(result['import_torch'])} s"],
            ["import disco_client after it", f"{show(result['import_client'], 3)} s"],
            ["attach, arena of 1 GiB", f"{show(result['attach'], 1, 1e3)} ms"],
            ["detach", f"{show(result['detach'], 1, 1e3)} ms"],
            ["daemon: from exec to ready", f"{show(result['daemon_start'])} s"],
            ["daemon: bare Python to its end", f"{show(result['bare_python'])} s"],
            ["daemon idle: resident", f"{show(result['resident_bytes'], 1, 1e-6)} MB"],
            ["daemon idle: its own (USS)", f"{show(result['own_bytes'], 1, 1e-6)} MB"],
        ]
        return (
            "Each in new processes, in turns. *Ready* is when a client is greeted. The arena is "
            "backed as it is used, so attaching does not wait for memory.\n\n"
        ) + table(["what", "median (least-greatest)"], rows)

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        return []


def measure(rounds: int, directory: Path, progress: Progress) -> dict[str, Any]:
    """All of it, ``rounds`` times."""
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        torch_seconds, client_seconds = _python(_IMPORT)
        note(import_torch=torch_seconds, import_client=client_seconds)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        note(bare_python=time.perf_counter() - began)
        _start(directory, note)
    with service(directory) as daemon:
        for number in range(rounds):
            progress(f"attaching, {number + 1} of {rounds}")
            attach_seconds, detach_seconds = _python(_ATTACH, str(daemon.socket_dir), "1GiB")
            note(attach=attach_seconds, detach=detach_seconds)
    return {name: spread(values) for name, values in found.items()}


def _start(directory: Path, note: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="discod-bench-") as sockets:
        scratch = directory / "start"
        scratch.mkdir(exist_ok=True)
        began = time.perf_counter()
        daemon = Daemon(
            scratch=scratch, socket_dir=Path(sockets), log_path=Path(sockets) / "daemon.log"
        )
        try:
            daemon.wait_until_ready()
            note(daemon_start=time.perf_counter() - began)
            memory = psutil.Process(daemon.pid).memory_full_info()
            note(resident_bytes=float(memory.rss), own_bytes=float(memory.uss))
        finally:
            daemon.close()


def _python(program: str, *arguments: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    first, second = map(float, done.stdout.split())
    return first, second
