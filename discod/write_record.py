"""What was written, noted in the scratch directories: the next daemon's budget begins with it.

The one name that discod leaves in a directory, and only with ``--write-budget``: a budget that a
restart resets would be no cap. It is in every directory, because any may be left out next time, and
the fullest is believed.

Moments are of the present boot. What was written before it counts as if written when it began: for
how long the machine was off is for a clock to say that somebody can set.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from discod.chores import Chores
from discod.logs import RateLimited
from discod.probe import FILE_PREFIX
from discod.window import Entry

NAME = ".discod.written"
_NEW_NAME = f"{FILE_PREFIX}written"
"""While it is being made; by its prefix a daemon removes what a killed one left."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")

LAST_SECONDS = 0.5
"""Of the seconds that the exit may take; what was noted before is ahead of the truth anyway."""

MOST_BYTES = 1 << 20
"""A record has some 30 KiB; more is none of ours."""

_log = logging.getLogger(__name__)
_failures = RateLimited(_log, 600.0)


class WriteRecord:
    """The record.

    Args:
        directories: The scratch directories.
        chores: Where it is written: a disk may be slow.
    """

    def __init__(self, directories: Sequence[Path], chores: Chores) -> None:
        self._directories = directories
        self._chores = chores
        self._lock = threading.Lock()
        self._closed = False
        self._writing = False
        self._next: list[Entry] | None = None

    def load(self) -> list[Entry]:
        """What the last daemon has noted; nothing where there is no record that can be read."""
        found = [_read(directory / NAME) for directory in self._directories]
        return max(found, key=lambda entries: sum(size for _, size in entries))

    def save(self, entries: list[Entry]) -> None:
        """Have it written soon; of several the last."""
        self._next = entries
        if not self._writing:
            self._go_on(None)

    def save_now(self, entries: list[Entry]) -> None:
        """Write it for the last time, when the loop has ended."""
        self._closed = True
        # What is being written goes first; a disk that hangs must not keep the daemon from ending.
        if self._lock.acquire(timeout=LAST_SECONDS):
            self._write_all(entries)

    def _go_on(self, outcome: object) -> None:
        entries, self._next = self._next, None
        self._writing = entries is not None
        if entries is not None:
            self._chores.submit(partial(self._write, entries), self._go_on)

    def _write(self, entries: list[Entry]) -> None:
        with self._lock:
            if not self._closed:
                self._write_all(entries)

    def _write_all(self, entries: list[Entry]) -> None:
        text = json.dumps({"version": 1, "boot": boot_id(), "written": entries})
        for directory in self._directories:
            try:
                _replace(directory, text)
            except OSError as error:
                _failures.warning(
                    "%s cannot be written: %s; if this daemon is restarted, its --write-budget "
                    "forgets what was written since",
                    directory / NAME,
                    error,
                )


def boot_id() -> str:
    """What tells this boot of the machine from others; empty where the kernel does not say."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _replace(directory: Path, text: str) -> None:
    new = directory / _NEW_NAME
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
    os.replace(new, directory / NAME)


def _read(path: Path) -> list[Entry]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if os.fstat(fd).st_uid != os.geteuid():
                raise ValueError("it belongs to another user")
            return _entries(json.loads(file.read(MOST_BYTES)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.warning(
            "%s cannot be used: %s; --write-budget begins as if nothing had been written",
            path,
            error,
        )
        return []


def _entries(record: object) -> list[Entry]:
    if not isinstance(record, dict) or record.get("version") != 1:
        raise ValueError("it is no record of this version")
    entries = record.get("written")
    if not isinstance(entries, list):
        raise ValueError("it has no entries")
    same_boot = record.get("boot") == boot_id() != ""
    made = []
    for entry in entries:
        match entry:
            case [int() | float() as start, int() as size_bytes] if size_bytes >= 0:
                made.append((float(start) if same_boot else 0.0, size_bytes))
            case _:
                raise ValueError(f"{entry!r} is no entry")
    return made
