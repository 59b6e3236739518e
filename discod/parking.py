"""Scratch files of clients that were hung up on, until they resume.

A client whose I/O connection is lost comes back within moments and needs what is in its files.
Until then they stay open here and counted in the quota: its own ``O_PATH`` fds keep their blocks on
the disk, so that counting them as free would let it have the quota again and again. When its
process has ended, or says that it gives them up, or where the end of a process cannot be told (no
pidfd) after ``WAIT_SECONDS``, they are emptied and released.

Its arena is not kept: that is memory of its own process, which only the daemon's mapping counted in
``--ram``.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from discod.chores import Chores
from discod.loop import Loop, Timer
from discod.tenant import File

WAIT_SECONDS = 600.0
"""Ten times as long as a client waits for a daemon by default."""

MOST_LOTS = 64
"""Of a process, whose oldest one is emptied then. An honest one has a lot or two: it has one
attachment, and comes back; so many are of one that attaches and hangs up again and again."""

Inode = tuple[int, int]
Owner = tuple[int, int]
"""A client's pid and uid."""

_log = logging.getLogger(__name__)


class Lot:
    """The files of one client, and who it is."""

    def __init__(self, files: Sequence[File], owner: Owner, pidfd: int | None) -> None:
        self.files = {file.scratch.inode: file for file in files}
        self.owner = owner
        self.pidfd = pidfd
        self.timer: Timer | None = None
        self.lent = False
        self.ended = False


class Parking:
    """All such files. For the event loop alone.

    Args:
        loop: The event loop.
        chores: Where files are emptied.
        released: Called with files that are closed now.
    """

    def __init__(
        self, loop: Loop, chores: Chores, released: Callable[[Iterable[Inode]], None]
    ) -> None:
        self._loop = loop
        self._chores = chores
        self._released = released
        self._lots: list[Lot] = []

    def __len__(self) -> int:
        """Clients that may come back."""
        return len(self._lots)

    def add(self, files: Sequence[File], owner: Owner, pidfd: int | None) -> Lot:
        """Keep a client's files. ``pidfd``, from now on the lot's, tells of its end."""
        lot = Lot(files, owner, pidfd)
        others = [other for other in self._lots if other.owner == owner and not other.lent]
        if len(others) >= MOST_LOTS:
            self._ended(others[0])
        self._lots.append(lot)
        ended = partial(self._ended, lot)
        if pidfd is None:
            lot.timer = self._loop.call_later(WAIT_SECONDS, ended)
        else:
            self._loop.add_reader(pidfd, ended)
        return lot

    def find(self, inodes: set[Inode], *, lent: bool = False) -> Lot | None:
        """The lot that has exactly these files; with ``lent`` also one that is lent."""
        for lot in self._lots:
            if lot.files.keys() == inodes and (lent or not lot.lent):
                return lot
        return None

    def lend(self, lot: Lot) -> None:
        """Its client is about to be let in again."""
        lot.lent = True

    def take_back(self, lot: Lot) -> None:
        """It was not let in after all."""
        lot.lent = False
        if lot.ended:
            self._discard(lot)

    def remove(self, lot: Lot) -> None:
        """It is let in, and the files are a tenant's again."""
        self._lots.remove(lot)
        self._forget(lot)

    def give_up(self, lot: Lot) -> None:
        """Its client will not come back."""
        if not lot.ended:
            self._ended(lot)

    def _ended(self, lot: Lot) -> None:
        self._forget(lot)
        lot.ended = True
        if not lot.lent:
            self._discard(lot)

    def _discard(self, lot: Lot) -> None:
        self._lots.remove(lot)
        for file in lot.files.values():
            close = partial(file.scratch.close, discard=True)
            self._chores.submit(close, partial(self._closed, file))

    def _closed(self, file: File, outcome: Exception | None) -> None:
        if outcome is not None:
            _log.error(
                "scratch %s: a file could not be emptied: %s", file.scratch.directory, outcome
            )
        self._released([file.scratch.inode])

    def _forget(self, lot: Lot) -> None:
        """Watch its process no more."""
        if lot.timer is not None:
            lot.timer.cancel()
            lot.timer = None
        if lot.pidfd is not None:
            self._loop.remove_reader(lot.pidfd)
            os.close(lot.pidfd)
            lot.pidfd = None
