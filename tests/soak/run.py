"""The soak itself: a daemon, two processes that last, others that come and go, and samples."""

import contextlib
import dataclasses
import json
import math
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers import nursery
from tests.helpers.daemon import Daemon, eventually
from tests.soak.procfs import Sample, sample

LASTING = 2
SAMPLE_SECONDS = 1.0
VISIT_SECONDS = (3.0, 12.0)
"""How long a visitor stays once it has begun, at least and at most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        seconds: How long.
        seed: Of all that is random, but for what time decides.
        arena_bytes, most_bytes: Of each process's arena, and of one tensor.
        restart_seconds: Between two restarts (SIGTERM and a new one) of the daemon; 0: none.
    """

    seconds: float
    seed: int = 0
    arena_bytes: int = 64 << 20
    most_bytes: int = 16 << 20
    restart_seconds: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What happened.

    Attributes:
        samples: By process: ``daemon`` (a new list after each restart), ``trainer 0``, ...
        disk: Seconds and scratch bytes that the daemon says are in use.
        done: The last line of each lasting process, and the sum over the visitors.
        visits: How many came, and how many of these were killed.
        restarts: Of the daemon.
        left: What was left at the end, by name; empty when nothing was.
    """

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    disk: list[tuple[float, int]] = field(default_factory=list)
    done: dict[str, dict[str, int]] = field(default_factory=dict)
    visits: int = 0
    kills: int = 0
    restarts: int = 0
    left: dict[str, Any] = field(default_factory=dict)


class Process:
    """A running ``program``."""

    def __init__(self, plan: Plan, socket_dir: Path, seed: int, log: Path) -> None:
        settings = {
            "seed": seed,
            "socket_dir": str(socket_dir),
            "arena": plan.arena_bytes,
            "most_bytes": plan.most_bytes,
        }
        with log.open("ab") as errors:
            self._process = nursery.start(
                *("-m", "tests.soak.program", json.dumps(settings)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )
        self.pid = self._process.pid
        self.last: dict[str, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last = json.loads(line)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, timeout: float = 120.0) -> int:
        """Let it end by itself; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(timeout)
        self._reap()
        return code

    def kill(self) -> None:
        """SIGKILL, and reap it; nothing where it has ended."""
        self._process.kill()
        self._process.wait()
        self._reap()

    def _reap(self) -> None:
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def soak(plan: Plan, folder: Path) -> Outcome:
    """Run it in ``folder``, where the logs stay.

    Raises:
        AssertionError: A process failed; its log is in the folder.
    """
    outcome = Outcome()
    with ExitStack() as ends, _socket_dir() as socket_dir:
        scratch = folder / "scratch"
        scratch.mkdir()

        def start() -> Daemon:
            daemon = Daemon(scratch=scratch, socket_dir=socket_dir, log_path=folder / "daemon.log")
            ends.callback(daemon.close)
            daemon.wait_until_ready()
            return daemon

        def process(seed: int, name: str) -> Process:
            made = Process(plan, socket_dir, seed, folder / f"{name}.log")
            ends.callback(made.kill)
            return made

        daemon = start()
        lasting = {f"trainer {n}": process(plan.seed + n, f"trainer-{n}") for n in range(LASTING)}
        eventually(lambda: all(each.last for each in lasting.values()), 120, "the first report")
        visitors = _Visitors(random.Random(plan.seed), process, outcome)
        start_at = time.monotonic()
        next_restart = plan.restart_seconds
        while (now := time.monotonic() - start_at) < plan.seconds:
            if plan.restart_seconds and now >= next_restart:
                daemon.close()
                daemon = start()
                outcome.restarts += 1
                next_restart = time.monotonic() - start_at + plan.restart_seconds
            outcome.samples.setdefault(f"daemon {outcome.restarts}", []).append(
                sample(daemon.pid, now)
            )
            for name, each in lasting.items():
                at_rest = dataclasses.replace(
                    sample(each.pid, now), anon_bytes=each.last["anon_bytes"]
                )
                outcome.samples.setdefault(name, []).append(at_rest)
            outcome.disk.append((now, daemon.status()["disk_used_bytes"]))
            visitors.look(now)
            for name, each in lasting.items():
                assert not each.ended, f"{name} ended; see its log in {folder}"
            time.sleep(SAMPLE_SECONDS)
        visitors.end()
        for name, each in lasting.items():
            code = each.end()
            assert code == 0, f"{name} ended with {code}; see its log in {folder}"
            outcome.done[name] = each.last
        outcome.left = _left(daemon, scratch, socket_dir)
    return outcome


class _Visitors:
    """One process after another; every second one is killed in the middle of what it does."""

    def __init__(self, rng: random.Random, make: Any, outcome: Outcome) -> None:
        self._rng = rng
        self._make = make
        self._outcome = outcome
        self._present: Process | None = None
        self._seconds = 0.0
        self._until = math.inf

    def look(self, now: float) -> None:
        if self._present is None:
            self._present = self._make(1000 + self._outcome.visits, "visitors")
            self._outcome.visits += 1
            self._seconds = self._rng.uniform(*VISIT_SECONDS)
            self._until = math.inf
        elif self._until == math.inf and self._present.last:
            self._until = now + self._seconds
        elif now >= self._until or self._present.ended:
            self.end()

    def end(self) -> None:
        if self._present is None:
            return
        if self._outcome.visits % 2:
            self._present.kill()
            self._outcome.kills += 1
        else:
            code = self._present.end()
            assert code == 0, f"a visitor ended with {code}; see its log"
        total = self._outcome.done.setdefault("visitors", {})
        for name, value in self._present.last.items():
            total[name] = total.get(name, 0) + value
        self._present = None


@contextmanager
def _socket_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dc-") as name:
        yield Path(name)


def _left(daemon: Daemon, scratch: Path, socket_dir: Path) -> dict[str, Any]:
    """End the daemon, and look for what should not be there any more."""
    left: dict[str, Any] = {}
    with contextlib.suppress(AssertionError):
        eventually(lambda: not daemon.status()["clients"])
        eventually(lambda: not daemon.status()["disk_used_bytes"])
    status = daemon.status()
    for name in ("clients", "disk_used_bytes", "ram_used_bytes"):
        if status[name]:
            left[name] = status[name]
    daemon.terminate()
    code = daemon.wait()
    if code:
        left["exit code of the daemon"] = code
    for directory in (scratch, socket_dir):
        if names := os.listdir(directory):
            left[str(directory)] = names
    return left
