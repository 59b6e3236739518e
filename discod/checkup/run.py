"""All checks, side by side and within a time: a file system or driver that hangs holds up no other.

A check that fails at something that nobody has thought of is a finding too.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from discod.checkup.client import check_client
from discod.checkup.container import check_container
from discod.checkup.daemon import Daemon, check_daemon, look_for_daemon
from discod.checkup.finding import Finding, fail, warn
from discod.checkup.gpu import Gpus, check_gpus, look_for_gpus
from discod.checkup.kernel import check_kernel
from discod.checkup.limits import check_limits
from discod.checkup.memory import check_memory
from discod.checkup.scratch import check_scratch

T = TypeVar("T")

MOST_SECONDS = 1.7
"""Until what has not answered is given up: the command as a whole has 2 s."""


@dataclass(slots=True)
class Section:
    """The findings about one kind of thing."""

    title: str
    findings: list[Finding] = field(default_factory=list)


def examine(scratch: Sequence[Path], socket_dir: Path) -> list[Section]:
    """All findings, in sections.

    Args:
        scratch: The scratch directories to look at.
        socket_dir: Where to look for a daemon.
    """
    deadline = time.monotonic() + MOST_SECONDS
    gpus = _Task(look_for_gpus)
    daemon = _Task(lambda: look_for_daemon(socket_dir))

    def with_daemon() -> Iterable[Finding]:
        return check_daemon(daemon.wait(deadline) or Daemon(socket_dir))

    def with_gpus() -> Iterable[Finding]:
        return check_gpus(gpus.wait(deadline) or Gpus([]))

    def limits() -> Iterable[Finding]:
        found = gpus.wait(deadline)
        return check_limits(len(found.uuids or found.nodes) if found else 0)

    def one(path: Path) -> Callable[[], Iterable[Finding]]:
        def check() -> Iterable[Finding]:
            found = daemon.wait(deadline)
            return check_scratch(path, found.pid if found else None)

        return check

    parts: list[tuple[str, str, Callable[[], Iterable[Finding]]]] = [
        *(("scratch", str(path), one(path)) for path in scratch),
        ("daemon", "", with_daemon),
        ("limits", "", limits),
        ("memory", "", check_memory),
        ("kernel", "", check_kernel),
        ("container", "", check_container),
        ("GPU", "", with_gpus),
        ("client", "", check_client),
    ]
    tasks = [(title, subject, _Task(partial(_all, make))) for title, subject, make in parts]
    sections: dict[str, Section] = {}
    for title, subject, task in tasks:
        section = sections.setdefault(title, Section(title))
        section.findings += _outcome(task, title, subject, deadline)
    if not scratch:
        sections = {"scratch": Section("scratch", [_no_scratch()]), **sections}
    return list(sections.values())


def _all(make: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(make())


def _outcome(
    task: "_Task[list[Finding]]", title: str, subject: str, deadline: float
) -> list[Finding]:
    findings = task.wait(deadline)
    if findings is not None:
        return findings
    if task.error is not None:
        kind = type(task.error).__name__
        remedy = "look into it by hand; if this is a bug of discod, please report it"
        return [warn(title, f"could not be checked: {kind}: {task.error}", remedy, subject)]
    found = f"no answer within {MOST_SECONDS} s"
    return [fail(title, found, "see whether a disk, mount or driver hangs (dmesg)", subject)]


def _no_scratch() -> Finding:
    return warn("directory", "none was given, so that none was checked", "give --scratch DIR")


class _Task(Generic[T]):
    """A function in a thread of its own, which nothing waits for when the process ends."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: T | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except Exception as error:  # noqa: BLE001  said by whoever waits
            self.error = error

    def wait(self, deadline: float) -> T | None:
        """What it gives; None when it raises, or is not done by the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._value
