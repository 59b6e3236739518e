"""The ranks as the adversary's side has them: processes that can be told, killed and stopped.

They are forked from a server that has torch loaded already (multiprocessing's), so that a rank is
back some milliseconds after it was killed, and hundreds can be in minutes.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.rank import main

REPLY_SECONDS = 120.0
"""For one step, faults included; then it hangs. The machines that run this are small and busy."""
STACKS_SECONDS = 1.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.chaos.rank"])


class Hang(Exception):
    """A rank said nothing in time; its stacks are in its log."""


class Died(Exception):
    """A rank ended that nobody killed."""


class Rank:
    """One process.

    Args:
        name: For messages and the log's name.
        settings: As of :func:`tests.chaos.rank.main`, but for the log.
        logs: Where its log goes.

    Attributes:
        step: The next one; a new process begins at the first.
        attach_errors: What its attaches raised before one went well.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], logs: Path) -> None:
        self.name = name
        self.settings = settings
        self.log = logs / f"{name}.log"
        self.step = 0
        self.attach_errors: list[str] = []
        self._outstanding = 1  # it will say "ready"
        self._said: list[dict[str, Any]] = []
        self._control, theirs = _context.Pipe()
        self._process = _context.Process(
            target=main, args=(theirs, {**settings, "log": str(self.log)}), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or 0

    def begin_step(self) -> None:
        """Have it make its next step."""
        self.tell("step", step=self.step)

    def tell(self, do: str, **what: Any) -> None:
        """Have it do something, after all it was told before."""
        self._outstanding += 1
        self._control.send_bytes(json.dumps({"do": do} | what).encode())

    @property
    def ended(self) -> bool:
        """Whether the process is over: its pid may be another's then."""
        return self._process.exitcode is not None

    @property
    def busy(self) -> bool:
        """Whether it has still something to say."""
        self._take_in(0)
        return self._outstanding > 0

    def said(self, timeout: float = REPLY_SECONDS) -> list[dict[str, Any]]:
        """All that it says to what it was told and has not been fetched yet.

        Raises:
            Hang: Not within ``timeout`` seconds.
            Died: It ended instead.
        """
        deadline = time.monotonic() + timeout
        while self._outstanding:
            if not self._take_in(max(0.0, deadline - time.monotonic())):
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(STACKS_SECONDS)
                raise Hang(f"{self.name} (pid {self.pid}) said nothing for {timeout:g} s")
        said, self._said = self._said, []
        return said

    def kill(self) -> None:
        """SIGKILL, without waiting for its end."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, in whatever state it is; idempotent."""
        self._process.kill()
        self._process.join()
        self._control.close()

    def _take_in(self, timeout: float) -> bool:
        """Take in what is there, waiting for the first word; False when there was none."""
        if not self._outstanding or not self._control.poll(timeout):
            return False
        try:
            message: dict[str, Any] = json.loads(self._control.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise Died(f"{self.name} (pid {self.pid}) ended by itself; see {self.log}") from None
        self._outstanding -= 1
        if message["said"] == "ready":
            self.attach_errors += message["attach_errors"]
        else:
            self._said.append(message)
        return True


@dataclass(slots=True)
class Job:
    """Ranks in their places.

    Attributes:
        ranks: Its processes.
        expected: Of each rank and step of a period, the fingerprint without discod.
    """

    name: str
    ranks: list[Rank] = field(default_factory=list)
    expected: list[list[str]] = field(default_factory=list)
