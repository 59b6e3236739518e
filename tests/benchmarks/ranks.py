"""Processes that save and load through one daemon, in step: ``Ranks`` tells each what to do next.

A rank is a worker (:mod:`tests.benchmarks.workers`) that is told one word a line and answers with
one line of JSON.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import disco_client
from tests.benchmarks.cycles import Cycles, Phase
from tests.benchmarks.daemon_cost import cpu_seconds
from tests.benchmarks.workers import Worker, answering, answers
from tests.helpers.daemon import Daemon

WORDS = ("warm-up", "write", "read", "mixed", "drop")

START_SECONDS = 120.0
PHASE_SECONDS = 300.0
"""Far more than any phase takes: a rank that hangs must not hang the benchmark."""


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
        settings = json.dumps([str(daemon.socket_dir), blob_bytes, blobs, arena_bytes])
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="discod-ranks-")))
            self._ranks = []
            for number in range(count):
                rank = Worker("tests.benchmarks.ranks", settings, folder / f"rank{number}.log")
                stack.callback(rank.kill)
                self._ranks.append(rank)
            answers(self._ranks, START_SECONDS)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._stack:
            if error is None:
                for rank in self._ranks:
                    rank.end()
                for rank in self._ranks:
                    rank.close()

    def all(self, word: str) -> Together:
        """What each rank did on ``word``, of :data:`WORDS`, all at the same time.

        Raises:
            WorkerFailed: A rank has ended, or did nothing for ``PHASE_SECONDS``; with what it said.
        """
        before = cpu_seconds(self._daemon_pid)
        for rank in self._ranks:
            rank.tell(word)
        lines = answers(self._ranks, PHASE_SECONDS)
        phases = [Phase(**json.loads(line)) for line in lines]
        return Together(phases, cpu_seconds(self._daemon_pid) - before)


def serve(socket_dir: str, blob_bytes: int, blobs: int, arena_bytes: int) -> None:
    """One rank's life."""
    torch.set_num_threads(1)  # as torchrun sets it for every rank
    disco_client.connect(socket_dir, arena=arena_bytes)
    cycles = Cycles(blob_bytes, blobs)
    with answering() as answer:
        answer("ready")
        serve_words(cycles, answer)
    cycles.close()
    disco_client.close()


def serve_words(cycles: Cycles, answer: Callable[[str], None]) -> None:
    """Until the end of stdin."""
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
        answer(json.dumps(asdict(phase)))


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
