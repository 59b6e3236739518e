"""Which scratch directories are in use: one whose device fails is left alone until it works again.

What counts
-----------
An error counts when its errno says that the device or its file system does not work
(``DEVICE_ERRORS``), whichever call it comes from. No room does not count, nor does a wrong
checksum, nor what a client can bring about by itself: a slot without memory, a read of what was
never written.

What follows
------------
1. The directory is out of use: writes to it are refused, so that clients write to their other
   files, and new clients get no file in it. Reads of what lies there are still tried.
2. Every ``PROBE_SECONDS`` a new file is made there, written and read. When that works, the
   directory is in use again.
3. The last directory in use stays in use, whatever it does: there is no better one.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from discod.chores import Chores
from discod.loop import Loop

PROBE_SECONDS = 30.0
"""A device that failed is not trusted at once, and a probe of a sick one may take its seconds."""

DEVICE_ERRORS = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.ENOMEDIUM),
        # What file systems say of damage to themselves, the second for wrong checksums of theirs.
        *(errno.EUCLEAN, errno.EBADMSG, errno.EROFS),
        # A server, or the process of a FUSE file system, is gone.
        *(errno.ESTALE, errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN, errno.EHOSTDOWN),
        errno.ENOLINK,
        # The directory was removed, or is not ours any more.
        *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM),
    }
)

_log = logging.getLogger(__name__)


class Health:
    """Of one directory.

    Attributes:
        in_use: Whether it may be written to.
        last_failure: What failed last on its device, for people; empty when nothing has.
    """

    def __init__(self) -> None:
        self.in_use = True
        self.last_failure = ""
        self._failed: Callable[[], None] = lambda: None

    def watch(self, failed: Callable[[], None]) -> None:
        """Have ``failed`` called after each failure of the device, in whichever thread."""
        self._failed = failed

    def note(self, error: OSError, what: str) -> bool:
        """A call has failed with ``error``; ``what`` says so, with operation and errno.

        Returns:
            Whether the directory is in use after that.
        """
        if error.errno in DEVICE_ERRORS:
            self.last_failure = what
            self._failed()
        return self.in_use


class Watched(Protocol):
    """What is needed of a scratch directory."""

    health: Health

    def check(self) -> None:
        """Write and read in a new file. Raises ``OSError`` when that does not work."""

    def __str__(self) -> str:
        """Its path."""


class Outages:
    """Takes directories out of use and back.

    Args:
        directories: All of them.
        loop: For the time between probes.
    """

    def __init__(self, directories: Sequence[Watched], loop: Loop) -> None:
        self._directories = directories
        self._loop = loop
        self._lock = threading.Lock()
        self._prober: Chores | None = None
        for directory in directories:
            directory.health.watch(partial(self._failed, directory))

    def _failed(self, directory: Watched) -> None:
        health = directory.health
        with self._lock:
            in_use = sum(other.health.in_use for other in self._directories)
            if not health.in_use or in_use == 1:
                return
            health.in_use = False
        _log.warning(
            "scratch %s is out of use: %s; what is written goes to the other directories until a "
            "write and a read there succeed, which is tried every %.0f s",
            directory,
            health.last_failure,
            PROBE_SECONDS,
        )
        outage = _Outage(directory, time.monotonic())
        self._loop.post(partial(self._wait, outage))

    def _wait(self, outage: "_Outage") -> None:
        self._loop.call_later(PROBE_SECONDS, partial(self._probe, outage))

    def _probe(self, outage: "_Outage") -> None:
        if self._prober is None:
            # A thread of its own: a device may hang, and attaches must not wait for it.
            self._prober = Chores(self._loop.post)
        self._prober.submit(outage.directory.check, partial(self._probed, outage))

    def _probed(self, outage: "_Outage", outcome: Exception | None) -> None:
        directory = outage.directory
        if outcome is None:
            directory.health.in_use = True
            away = time.monotonic() - outage.since
            _log.warning("scratch %s works, and is in use again after %.0f s", directory, away)
            return
        if str(outcome) != outage.last_probe:
            outage.last_probe = str(outcome)
            _log.warning("scratch %s stays out of use: a probe failed: %s", directory, outcome)
        self._wait(outage)


@dataclass(slots=True)
class _Outage:
    directory: Watched
    since: float
    last_probe: str = ""
