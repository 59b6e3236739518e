"""Starting ranks as processes, and reading what they report."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from tests.helpers import nursery

ROOT = Path(__file__).parents[2]


class Rank:
    """One running rank: a process of ``tests.helpers.rank``, or of another program like it.

    Args:
        settings: The program's.
        program: Its module.
        stderr: Where it writes errors.
        fresh: Whether it is to be a new interpreter: no GPU is for processes of the nursery.
        environment: More environment.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        program: str = "tests.helpers.rank",
        stderr: IO[str] | None = None,
        fresh: bool = False,
        **environment: str,
    ) -> None:
        streams: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": stderr,
        }
        start = nursery.start_fresh if fresh else nursery.start
        self.process = start(
            *("-m", program, json.dumps(settings)), env=os.environ | environment, **streams
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> None:
        """Until its first forward is done."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", f"the rank said {line!r}"

    def go_on(self) -> None:
        """Let a paused rank go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def report(self, timeout: float = 100) -> dict[str, Any]:
        """Wait for its end, and return what it reported."""
        try:
            out, _ = self.process.communicate(timeout=timeout)
        finally:
            self.kill()
        assert self.process.returncode == 0, f"the rank ended with {self.process.returncode}"
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return result

    def kill(self) -> None:
        """SIGKILL and reap it."""
        self.process.close()


def run_job(
    ranks: int,
    settings: dict[str, Any],
    program: str = "tests.helpers.rank",
    timeout: float = 100,
) -> list[dict[str, Any]]:
    """Run a job of ``ranks`` processes to its end; the reports in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        job = settings | {"store": f"{folder}/store"}
        environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        processes = [Rank(job, program, RANK=str(rank), **environment) for rank in range(ranks)]
        try:
            return [process.report(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
