"""The daemon of a simulated world: the real server, its threads and its loop one step at a time."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from discod import server, tenant
from discod.config import Config

if TYPE_CHECKING:
    from tests.model.world import World

CHUNK_BYTES = 2 * 4096
RAM_BYTES = 64 << 20
DISK_BYTES = 1 << 30

Step = Callable[[], None]


class Daemon:
    """One daemon process."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.frozen_until = 0.0
        self.server = server.Server(
            Config(
                scratch=(world.scratch,),
                socket_dir=world.socket_dir,
                ram_bytes=RAM_BYTES,
                disk_bytes=DISK_BYTES,
                threads=2,
                chunk_bytes=CHUNK_BYTES,
            )
        )
        self.loop: Any = self.server._loop
        self.chores: Any = self.server._chores
        self.engine: Any = self.server._devices[0].engine
        self.router: Any = self.server._router
        self.clients: Any = self.server._clients

    def steps(self) -> list[Step]:
        """What it could do next."""
        if self.world.clock.now < self.frozen_until:
            return list(self.engine.steps())
        found = [*self.loop.steps(), *self.chores.steps(), *self.engine.steps()]
        if (self.router.inbox and not self.server._draining) or self.router.ended:
            found.append(self.server._more)
        return found

    def die(self) -> None:
        """SIGKILL, or the end of a drained exit: the kernel closes everything."""
        self.router.close()
        self.engine.end_of_process(self.world.chance)
        self.world.note(self.engine.violations)
        for client in list(self.clients._clients.values()):
            _close(client.lifeline, client.peer)
            if not getattr(client.tenant, "freed", False):
                client.tenant.unmap()
                _close_files(client.tenant.files)
        for lot in self.clients._admission.parking._lots:
            _close_files(lot.files.values())
            if lot.pidfd is not None:
                os.close(lot.pidfd)
        for handshake in list(self.clients._reception._handshakes):
            _close(handshake._connection, handshake.peer)
        self.chores.end_of_process()
        with contextlib.suppress(OSError):
            self.clients._reception._listener.close()
        for device in self.server._devices:
            device.directory.close()
        os.close(self.server._socket_dir._lock_fd)
        for fd in self.world.handed_over:
            os.close(fd)
        self.world.handed_over.clear()
        self.world.connecting.clear()

    def leave(self) -> None:
        """What ``Server.run`` does when its loop has stopped."""
        self.router.close()
        self.server._socket_dir.remove_sockets()
        self.die()


def _close_files(files: Iterable[tenant.File]) -> None:
    for file in files:
        file.scratch.close(discard=False)


def _close(connection: socket.socket, peer: Any) -> None:
    connection.close()
    peer.close()
