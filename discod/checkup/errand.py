"""A function run in a process of its own, which may be left behind.

What waits for a dead server or a driver may not even end by SIGKILL, and a thread of ours that did
would keep this process from ending.
"""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from discod.checkup.finding import Finding, Level, fail, warn

Answer = tuple[Sequence[Finding], int]
"""Findings, and a number that other checks want to know."""


_MOMENT_SECONDS = 0.05
"""For the rest of an answer that is larger than a pipe."""


class Errand:
    """One such process. To be made while this process has one thread.

    Args:
        what: The check, for the finding that there is no answer.
        function: What to do there.
        subject: As in :class:`Finding`.
    """

    def __init__(self, what: str, function: Callable[[], Answer], subject: str = "") -> None:
        self._what = what
        self._subject = subject
        self._began = time.monotonic()
        self._fd, theirs = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            _run(function, theirs)
        os.close(theirs)

    def wait(self, deadline: float) -> Answer:
        """The answer, or a finding that says why there is none."""
        data = self._read(deadline)
        if data is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            seconds = time.monotonic() - self._began
            remedy = "see whether a disk, a mount or a driver hangs (dmesg)"
            return [fail(self._what, f"no answer within {seconds:.1f} s", remedy, self._subject)], 0
        os.waitpid(self._pid, 0)
        answer = json.loads(data or '{"error": "its process has crashed"}')
        if "error" in answer:
            remedy = "look into it by hand; if it is a fault of discod, please report it"
            found = f"could not be checked: {answer['error']}"
            return [warn(self._what, found, remedy, self._subject)], 0
        findings = [
            Finding(**finding | {"level": Level(finding["level"])})
            for finding in answer["findings"]
        ]
        return findings, answer["number"]

    def _read(self, deadline: float) -> bytes | None:
        """All that it says; None: it does not come to an end."""
        data = b""
        try:
            while self._says_more(deadline):
                more = os.read(self._fd, 1 << 16)
                if not more:
                    return data
                data += more
        finally:
            os.close(self._fd)
        return None

    def _says_more(self, deadline: float) -> bool:
        """Whether there is something to read in time; what was said by then is in time."""
        seconds = max(_MOMENT_SECONDS, deadline - time.monotonic())
        return bool(select.select([self._fd], [], [], seconds)[0])


def _run(function: Callable[[], Answer], answer_fd: int) -> None:
    """In the other process: it keeps nothing open that somebody waits for the end of."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        try:
            findings, number = function()
            answer: dict[str, object] = {"findings": [*map(asdict, findings)], "number": number}
        except Exception as error:  # noqa: BLE001  said by whoever waits
            answer = {"error": f"{type(error).__name__}: {error}"}
        with open(answer_fd, "wb") as file:
            file.write(json.dumps(answer).encode())
    finally:
        os._exit(0)
