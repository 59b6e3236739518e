"""A trainer process of a simulated world: the real session over the real link."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from disco_client import session
from disco_client.arena import Arena
from disco_client.blobs import Group
from disco_client.errors import DaemonError, DaemonLost
from disco_client.greeting import Greeting
from disco_client.link import Link
from disco_client.residency import Residency
from disco_client.session import Session

if TYPE_CHECKING:
    from tests.model.world import World

PAGE = 4096
RECONNECT_SECONDS = 600.0
MOST_STEPS = 200_000
"""Of one call; beyond that it hangs."""


class Crashed(BaseException):
    """The trainer was killed where this is raised."""


class Handle:
    """Owns a blob."""


class Trainer:
    """One trainer process.

    Args:
        world: Where it lives.
        name: For the content of its blobs.
        pages: Of the arena that are used.
    """

    def __init__(self, world: "World", name: str, pages: int) -> None:
        self.world = world
        self.life = os.eventfd(0, os.EFD_CLOEXEC)
        """In place of its pidfd: readable when it has ended."""
        self.blobs: dict[int, tuple[Handle, bytes, Any]] = {}
        self.views: list[memoryview] = []
        self.group = Group()
        self.dropping = False
        self._name = name
        self._count = 0
        world.trainers.append(self)
        self.arena = Arena(2 << 20)
        with self._running():
            self.link = self._attach()
            with mock.patch.object(session, "Residency", lambda _, files: Residency(
                pages * PAGE, files
            )):  # fmt: skip
                self.session = Session(self.arena, self.link)

    # What it does

    def save(self, pages: int) -> int:
        """A new blob with bytes of its own."""
        self._count += 1
        data = b"".join(
            f"{self._name}/{self._count}/{page};".encode().ljust(PAGE, b"\x5a")
            for page in range(pages)
        )
        handle = Handle()

        def fill(slot: int, memory: memoryview) -> None:
            memory[:] = data

        blob, end = self._call(lambda: self.session.save(len(data), fill, self.group, handle))
        self.blobs[blob] = handle, data, end
        return blob

    def load(self, blob: int, *, keep: bool = False) -> None:
        """Load and compare; ``keep`` the view."""
        _, data, _ = self.blobs[blob]
        found = [self._call(lambda: self.session.load(blob, len(data)))[0]]
        assert bytes(found[0]) == data, f"{self._name}: blob {blob} is not what was saved"
        if keep:
            self.views.append(found[0])
        self._drop(found)

    def free(self, blob: int) -> None:
        """The handle goes."""
        whole = self.blobs.pop(blob)
        self._call(whole[2])

    def drop_views(self) -> None:
        """Loans end."""
        self._drop(self.views)

    def _drop(self, views: list[memoryview]) -> None:
        with self._running():
            self.dropping = True
            views.clear()
            self.dropping = False

    def prefetch(self) -> None:
        """Read ahead."""
        self._call(lambda: self.session.prefetch(None))

    def notice(self) -> None:
        """See what has become of the connection."""
        with self._running():
            self.session.stats()

    def close(self) -> None:
        """Detach; the process lives on."""
        self.drop_views()
        with self._running():
            self.session.close()
        self._end()

    def crash(self) -> None:
        """SIGKILL: raises :class:`Crashed` where the trainer itself is running."""
        if self.dropping:
            return  # nothing can be raised in a finalizer
        if self.world.running is self:
            self.session._monitor._closed = True
            raise Crashed
        self._bury()

    def _bury(self) -> None:
        """The kernel closes what the process had."""
        self.session._monitor._closed = True
        self.link._lifeline.close()
        self.link._io.close()
        for fd in (*self.link._scratch_fds, self.link._wake_fd):
            os.close(fd)
        self.views.clear()
        self.arena.close()
        self._end()
        os.eventfd_write(self.life, 1)

    def _end(self) -> None:
        self.blobs.clear()
        if self in self.world.trainers:
            self.world.trainers.remove(self)
        self.world.dead.append(self)

    def _call(self, function: Callable[[], Any]) -> Any:
        """A call that is tried again after each silence of a frozen daemon."""
        while True:
            try:
                with self._running():
                    return function()
            except DaemonLost:
                assert self.world.was_frozen, "no daemon was frozen, and it is said to be silent"
                self.world.was_frozen = False

    def _attach(self) -> Link:
        while True:
            with contextlib.suppress(DaemonError):
                return Link(
                    Greeting(self.world.socket_dir),
                    self.arena.fd,
                    self.arena.size_bytes,
                    reconnect_timeout=RECONNECT_SECONDS,
                    reply_timeout=5.0,
                    restart=lambda: None,
                )
            self.world.go_on(0.1)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        before, self.world.running = self.world.running, self
        self.world.steps_left = MOST_STEPS
        try:
            yield
        except Crashed:
            self._bury()
            raise
        finally:
            self.world.running = before
