"""Faults of a disk on demand, for tests: the calls of :class:`discod.io.Io`, failing or waiting.

Nothing of this is there unless ``DISCOD_FAULTS`` names a file when the daemon starts. The file has
one rule a line, and is read again when it changes or is removed, so that a running daemon can be
given faults and be healed::

    CALL FAULT [CONDITION ...]        # a comment

CALL is ``open``, ``fallocate``, ``pwritev``, ``preadv`` or ``write_back``. FAULT is the name of an
errno (``EIO``), ``delay=SECONDS``, which ends when the file changes, ``short``: half of what was
asked for, in whole pages, or ``nothing``: the call succeeds and transfers no byte. CONDITIONs:
``in=TEXT``, where the file's path contains it; ``nth=N``, the N-th such call since the rule was
read, from 1; ``from=N``, that and all after it; ``every=N``.

Rules apply from top to bottom, delays before the call; the first errno ends it.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from discod.exits import Exit, StartupError
from discod.io import Io
from discod.wire import PAGE_BYTES

VARIABLE = "DISCOD_FAULTS"

_CALLS = ("open", "fallocate", "pwritev", "preadv", "write_back")
_POLL_SECONDS = 0.01

_log = logging.getLogger(__name__)


class BadRule(ValueError):
    """A line is no rule; the text has the line."""


@dataclass(slots=True)
class _Rule:
    call: str
    errno: int = 0
    delay_seconds: float = 0.0
    most: float = 1.0
    """Of what was asked for, the part to transfer."""
    within: str = ""
    first: int = 1
    last: int | None = None
    every: int = 1
    seen: int = 0

    def matches(self, call: str, path: str) -> bool:
        """Whether it applies to this call, which is counted."""
        if call != self.call or self.within not in path:
            return False
        self.seen += 1
        past = self.last is not None and self.seen > self.last
        return self.seen >= self.first and not past and self.seen % self.every == 0


def from_environment() -> Io:
    """The plain calls, unless ``DISCOD_FAULTS`` is set.

    Raises:
        StartupError: Its file cannot be read, or has a line that is no rule.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return Io()
    try:
        faults = Faults(Path(name))
    except (OSError, BadRule) as error:
        raise StartupError(
            Exit.FAULTS_UNUSABLE,
            f"{VARIABLE}={name} cannot be used: {error}; not started; correct it, or unset it: it "
            "is for tests alone",
        ) from error
    _log.warning("%s=%s: disks fail as it says, which is for tests alone", VARIABLE, name)
    return faults.io()


class Faults:
    """The rules of one file.

    Args:
        path: The file.

    Raises:
        BadRule: It has a line that is no rule.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plain = Io()
        self._lock = threading.Lock()
        self._version = self._stat()
        self._rules = parse(path.read_text())

    def io(self) -> Io:
        """The calls with these faults."""
        return Io(
            open=self._open,
            fallocate=self._fallocate,
            pwritev=self._pwritev,
            preadv=self._preadv,
            write_back=self._write_back,
        )

    def _open(self, path: Path | str, flags: int, mode: int) -> int:
        again = str(path).startswith("/proc/self/fd/")
        self._suffer("open", os.readlink(path) if again else str(path))
        return self._plain.open(path, flags, mode)

    def _fallocate(self, fd: int, offset: int, length: int) -> None:
        self._suffer("fallocate", _path_of(fd))
        self._plain.fallocate(fd, offset, length)

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        most = self._suffer("pwritev", _path_of(fd))
        return self._plain.pwritev(fd, _part(buffers, most), offset) if most else 0

    def _preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        most = self._suffer("preadv", _path_of(fd))
        return self._plain.preadv(fd, _part(buffers, most), offset) if most else 0

    def _write_back(self, fd: int, offset: int, length: int) -> None:
        self._suffer("write_back", _path_of(fd))
        self._plain.write_back(fd, offset, length)

    def _suffer(self, call: str, path: str) -> float:
        """Wait and raise as the rules say; which part of it the call is to transfer."""
        most = 1.0
        for rule in self._matching(call, path):
            self._wait(rule.delay_seconds)
            if rule.errno:
                raise OSError(rule.errno, os.strerror(rule.errno))
            most = min(most, rule.most)
        return most

    def _matching(self, call: str, path: str) -> list[_Rule]:
        with self._lock:
            version = self._stat()
            if version != self._version:
                try:
                    self._rules = parse(self._path.read_text())
                except FileNotFoundError:
                    self._rules = []
                except (OSError, BadRule) as error:
                    _log.error("%s: %s; the rules before stay", self._path, error)
                self._version = version
            return [rule for rule in self._rules if rule.matches(call, path)]

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        version = self._version
        while (left := end - time.monotonic()) > 0 and self._stat() == version:
            time.sleep(min(left, _POLL_SECONDS))

    def _stat(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return 0, 0, 0
        return status.st_ino, status.st_mtime_ns, status.st_size


def parse(text: str) -> list[_Rule]:
    """The rules in a file's text. Raises :class:`BadRule`."""
    rules = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            rules.append(_rule(line, words))
    return rules


def _rule(line: str, words: Sequence[str]) -> _Rule:
    if len(words) < 2 or words[0] not in _CALLS:
        raise BadRule(f"{line!r} does not begin with one of {', '.join(_CALLS)} and a fault")
    rule = _Rule(words[0])
    for word in words[1:]:
        name, _, value = word.partition("=")
        try:
            match name:
                case "delay":
                    rule.delay_seconds = float(value)
                case "short":
                    rule.most = 0.5
                case "nothing":
                    rule.most = 0.0
                case "in":
                    rule.within = value
                case "nth":
                    rule.first = rule.last = int(value)
                case "from":
                    rule.first = int(value)
                case "every":
                    rule.every = int(value)
                case _:
                    rule.errno = int(getattr(errno, name))
        except (ValueError, AttributeError) as error:
            raise BadRule(f"{word!r} in {line!r} is no fault and no condition") from error
    return rule


def _part(buffers: Sequence[memoryview], most: float) -> Sequence[memoryview]:
    """The first ``most`` of what is in ``buffers``, in whole pages, but one page at least."""
    size = sum(map(len, buffers))
    left = max(int(size * most) // PAGE_BYTES * PAGE_BYTES, min(size, PAGE_BYTES))
    part = []
    for buffer in buffers:
        part.append(buffer[:left])
        left -= len(part[-1])
    return [buffer for buffer in part if buffer]


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")
