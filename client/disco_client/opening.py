"""What an attachment has open: the daemon's greeting, the arena, the link, a daemon started here.

All of it is made and let go by :mod:`disco_client.uninterrupted`. The ledger has each from before
it opens anything until nothing of it is open any more, so that what an interrupt has kept from
being closed is closed by the next :func:`disco_client.connect`, by ``close()``, or at exit.
"""

import contextlib
import logging
import os
import time
from pathlib import Path

from disco_client.arena import HUGE_PAGE_BYTES, Arena
from disco_client.errors import DaemonNotRunning, UsageError
from disco_client.greeting import Greeting
from disco_client.io_connection import end_context
from disco_client.job import local_ranks
from disco_client.launch import SETTLE_SECONDS, Launcher
from disco_client.link import Link
from disco_client.session import Session
from disco_client.uninterrupted import Task, to_its_end
from discod.wire.messages import Welcome
from discod.wire.sizes import format_size

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class Opening:
    """See the module's text.

    Args:
        socket_dir: The daemon's socket directory.
        scratch: What to start a daemon with where there is none; empty: start none.
        arena_bytes: The arena's size; None: this process's share.
        reconnect_timeout, reply_timeout: As for :class:`Link`.
        start_timeout: Seconds that a daemon started here may take.

    Attributes:
        session: Of whoever uses it; None: nobody does.
    """

    def __init__(
        self,
        socket_dir: Path,
        scratch: list[Path],
        arena_bytes: int | None,
        *,
        reconnect_timeout: float,
        reply_timeout: float,
        start_timeout: float,
    ) -> None:
        self.session: Session | None = None
        self.arena: Arena | None = None
        self.link: Link | None = None
        self._socket_dir = socket_dir
        self._scratch = scratch
        self._arena_bytes = arena_bytes
        self._reconnect_timeout = reconnect_timeout
        self._reply_timeout = reply_timeout
        self._start_timeout = start_timeout
        self._launcher = Launcher(scratch, socket_dir) if scratch else None
        self._abandoned = False

    def open(self) -> tuple[Arena, Link]:
        """Attach. Raises as :func:`disco_client.connect`; nothing is open then.

        A signal handler that raises ends it for the caller at once; what it opens is closed.
        """
        opened = Task(self._open).wait()
        if self._abandoned:
            raise UsageError("close() was called in a signal handler in the middle of the attach")
        return opened

    def close(self) -> bool:
        """Close what is open, with its session if it has one; False: that cannot be now.

        Idempotent, and to be called again where it was interrupted.
        """
        self._abandoned = True
        if self.session is not None:
            self.session.close()
            if not self.session.detached:
                return False
        if self.arena is None:  # it is being opened, perhaps, which may take seconds
            Task(self._close)
        else:
            to_its_end(self._close)
        return True

    def after_fork(self) -> None:
        """In a forked child: it is the parent's."""
        if self.session is not None:
            self.session.after_fork()
        elif self.link is not None:
            self.link.abandon()

    def _open(self) -> tuple[Arena, Link]:
        if self._abandoned:
            raise UsageError("the attach was interrupted before it began")
        launcher = self._launcher
        greeting = self._greet()
        welcome = greeting.welcome
        try:
            size = _default_arena(welcome) if self._arena_bytes is None else self._arena_bytes
            arena = Arena(size)
        except BaseException:
            greeting.close()
            raise
        try:
            link = Link(
                greeting,
                arena.fd,
                arena.size_bytes,
                reconnect_timeout=self._reconnect_timeout,
                reply_timeout=self._reply_timeout,
                restart=launcher.ensure if launcher else _leave_to_others,
            )
        except BaseException:
            arena.close()
            raise
        self.link, self.arena = link, arena
        _log.info(
            "attached to discod %s (pid %d) in %s: arena %s, scratch %s",
            welcome.version,
            welcome.pid,
            self._socket_dir,
            format_size(arena.size_bytes),
            ", ".join(link.directories),
        )
        self._warn_of_other_scratch(welcome.pid, link)
        return arena, link

    def _close(self) -> None:
        if self.link is not None:
            self.link.close()
        if self.arena is not None:
            self.arena.close()
        if self._launcher is not None:
            self._launcher.close()
        end_context()

    def _greet(self) -> Greeting:
        """The daemon's greeting, after starting one if that is asked for and there is none."""
        launcher = self._launcher
        try:
            return Greeting(self._socket_dir)
        except DaemonNotRunning:
            if launcher is None:
                raise
        launcher.ensure()
        deadline = time.monotonic() + self._start_timeout
        failed_at: float | None = None
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                return Greeting(self._socket_dir)
            except DaemonNotRunning:
                launcher.poll()
                now = time.monotonic()
                if launcher.failure and failed_at is None:
                    failed_at = now
                settled = failed_at is not None and now > failed_at + SETTLE_SECONDS
                if now > deadline or settled or self._abandoned:
                    raise launcher.error(self._socket_dir) from None

    def _warn_of_other_scratch(self, pid: int, link: Link) -> None:
        wanted = set(map(os.path.realpath, self._scratch))
        if wanted and wanted != {os.path.realpath(d) for d in link.directories}:
            _log.warning(
                "a daemon was running already (pid %d), with scratch %s, so %s is not used; end "
                "that one first, or give this job another socket_dir",
                pid,
                ", ".join(link.directories),
                ", ".join(map(str, self._scratch)),
            )


class Ledger:
    """Every opening that may have something open."""

    def __init__(self) -> None:
        self._openings: list[Opening] = []

    def add(self, opening: Opening) -> None:
        """Before it is opened."""
        self._openings.append(opening)

    def close_all_but(self, kept: Opening | None) -> None:
        """Close what is open, except for the one that is in use."""
        for opening in list(self._openings):
            if opening is not kept and opening.close():
                with contextlib.suppress(ValueError):  # another thread was first
                    self._openings.remove(opening)

    def after_fork(self) -> None:
        """In a forked child: all are the parent's."""
        for opening in self._openings:
            opening.after_fork()
        self._openings = []


def _default_arena(welcome: Welcome) -> int:
    ranks = local_ranks()
    if ranks is None:  # a script, a notebook, an evaluation: others may come, and need some too
        share = welcome.ram_free_bytes // 2
    else:
        share = min(welcome.ram_bytes // ranks, welcome.ram_free_bytes)
    return max(HUGE_PAGE_BYTES, share // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)


def _leave_to_others() -> None:
    """The daemon was not started here, so it is not restarted here."""
