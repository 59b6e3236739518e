"""Processes that save and load through one daemon, in step: ``Ranks`` tells each what to do next.

A rank is a process of its own (``python -m tests.benchmarks.ranks``) that takes one word a line
from its standard input and answers with one line of JSON.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

import disco_client
from tests.benchmarks.cycles import Cycles, Phase
from tests.benchmarks.daemon_cost import cpu_seconds
from tests.benchmarks.frame import WrongBytes
from tests.helpers.daemon import Daemon
from tests.helpers.jobs import ROOT

WORDS = ("warm-up", "write", "read", "mixed", "drop")


@dataclass(frozen=True, slots=True)
class Together:
    """One phase of all ranks.

    Attributes:
        phases: Each rank's.
        daemon_cpu_seconds: The daemon's, from the first one's beginning to the last one's end.
    """

    phases: Sequence[Phase]
    daemon_cpu_seconds: float

    @property
    def disk_bytes(self) -> int:
        """Written and read, by all."""
        return sum(phase.written_bytes + phase.read_bytes for phase in self.phases)

    @property
    def rate(self) -> float:
        """Bytes per second of all, from the first one's beginning to the last one's end."""
        began = min(phase.began for phase in self.phases)
        ended = max(phase.ended for phase in self.phases)
        return self.disk_bytes / (ended - began)

    @property
    def daemon_cpu_per_gb(self) -> float:
        """CPU seconds of the daemon."""
        return self.daemon_cpu_seconds / (self.disk_bytes / 1e9)

    @property
    def client_cpu_per_gb(self) -> float:
        """CPU seconds of all ranks: of the copies, above all."""
        return sum(phase.cpu_seconds for phase in self.phases) / (self.disk_bytes / 1e9)


class Ranks:
    """Attached processes of one daemon; closed as a context.

    Args:
        daemon: The daemon.
        count: How many.
        blob_bytes, blobs, arena_bytes: Of each.
    """

    def __init__(
        self, daemon: Daemon, count: int, blob_bytes: int, blobs: int, arena_bytes: int
    ) -> None:
        self._daemon_pid = daemon.pid
        self._stack = ExitStack()
        self._processes = []
        arguments = [str(daemon.socket_dir), str(blob_bytes), str(blobs), str(arena_bytes)]
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.ranks", *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._stack.callback(_end, process)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def all(self, word: str) -> Together:
        """What each rank did on ``word``, of :data:`WORDS`, all at the same time.

        Raises:
            WrongBytes: A rank has found that, or has ended.
        """
        before = cpu_seconds(self._daemon_pid)
        for process in self._processes:
            if process.stdin is None:
                raise WrongBytes("a rank cannot be told anything")
            process.stdin.write(word + "\n")
            process.stdin.flush()
        phases = []
        for process in self._processes:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise WrongBytes(f"a rank ended while it did {word!r}; see what it printed")
            phases.append(Phase(**json.loads(line)))
        return Together(phases, cpu_seconds(self._daemon_pid) - before)


def _end(process: "subprocess.Popen[str]") -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def serve(socket_dir: str, blob_bytes: int, blobs: int, arena_bytes: int) -> None:
    """One rank's life."""
    torch.set_num_threads(1)  # as torchrun sets it for every rank
    disco_client.connect(socket_dir, arena=arena_bytes)
    cycles = Cycles(blob_bytes, blobs)
    for line in sys.stdin:
        word = line.strip()
        if word == "warm-up":
            # The first cycle makes extents and huge pages, without knowing the order; the second
            # knows it, and all bytes are compared.
            for check_all in (False, True):
                cycles.write()
                phase = cycles.read(check_all=check_all)
        elif word == "drop":
            cycles.drop()
            phase = Phase(0, 0, 0.0, 0.0, 0.0, 0.0)
        else:
            phase = {"write": cycles.write, "read": cycles.read, "mixed": cycles.mixed}[word]()
        print(json.dumps(asdict(phase)), flush=True)
    cycles.close()
    disco_client.close()


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:5]))
