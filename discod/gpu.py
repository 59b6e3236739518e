"""The daemon's process for one GPU: ``python -m discod.gpu FD UUID PARENT``, started by it alone.

It holds what would be dangerous in the daemon: a CUDA context, other processes' device memory, and
calls that may never return. It keeps nothing that matters: killed at any time, a new one is given
the same rings and copies again. It ends with the daemon, whatever that dies of.

Copies are made in :mod:`discod.gpu_client`; the daemon's side is :mod:`discod.gpus`.
"""

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
from uuid import UUID

from discod.cuda_driver import CudaError, CudaUnavailable, Driver, load
from discod.gpu_arena import GpuArena
from discod.gpu_client import GpuClient
from discod.gpu_messages import (
    AddClient,
    AddRing,
    Copy,
    Ended,
    Probe,
    Ready,
    RemoveClient,
    RemoveRing,
    ToDaemon,
    receive_in_process,
    send,
)
from discod.logs import set_up

LEAST_SLEEP_SECONDS = 0.0001
MOST_SLEEP_SECONDS = 0.001
"""Between looks at events while copies are waited for: at first a small part of what a copy of some
MB takes, then, through a trainer's long kernels, what costs next to no CPU."""

MESSAGES_PER_ROUND = 64
"""Then copies are looked after, however much is asked for."""

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class GpuServer:
    """Serves the daemon until it hangs up.

    Args:
        driver: CUDA, with the GPU's context current.
        connection: To the daemon.
    """

    def __init__(self, driver: Driver, connection: socket.socket) -> None:
        self._driver = driver
        self._connection = connection
        self._clients: dict[int, GpuClient] = {}
        self._sleep_seconds = LEAST_SLEEP_SECONDS

    def run(self) -> None:
        """Serve.

        Raises:
            ConnectionError: The daemon hung up.
            CudaError: The context is of no use any more.
        """
        self._say(Ready(""))
        while True:
            progress = self._receive()
            for number, client in list(self._clients.items()):
                progress |= client.advance()
                if client.left:
                    del self._clients[number]
            self._sleep(progress)

    def _sleep(self, progress: bool) -> None:
        if not any(client.busy for client in self._clients.values()):
            timeout = None
        elif progress:
            timeout = self._sleep_seconds = LEAST_SLEEP_SECONDS
        else:
            timeout = self._sleep_seconds
            self._sleep_seconds = min(2 * self._sleep_seconds, MOST_SLEEP_SECONDS)
        # poll and epoll know whole milliseconds only.
        select.select([self._connection], [], [], timeout)

    def _receive(self) -> bool:
        """Take in what has come; True when something has."""
        for count in range(MESSAGES_PER_ROUND):
            try:
                message, fds = receive_in_process(self._connection)
            except BlockingIOError:
                return count > 0
            match message:
                case AddClient():
                    self._add_client(message, fds[0])
                case RemoveClient():
                    if message.client in self._clients:
                        self._clients[message.client].leave(message.ticket)
                    else:
                        self._ended(message.ticket, "")
                case Probe():
                    self._ended(message.ticket, "")
                case AddRing() | RemoveRing() | Copy():
                    self._ring_work(message)
        return True

    def _add_client(self, message: AddClient, fd: int) -> None:
        try:
            arena = GpuArena(self._driver, fd, message.arena_bytes)
        except OSError as error:
            _log.warning("an arena cannot be mapped in the process of a GPU: %s", error)
        else:
            self._clients[message.client] = GpuClient(self._driver, arena, self._ended)

    def _ring_work(self, message: AddRing | RemoveRing | Copy) -> None:
        client = self._clients.get(message.client)
        if client is None:
            self._ended(message.ticket, "the client's arena could not be mapped")
            return
        match message:
            case AddRing():
                client.add_ring(message)
            case RemoveRing():
                client.remove_ring(message)
            case Copy():
                client.copy(message)

    def _ended(self, ticket: int, error: str) -> None:
        self._say(Ended(ticket, error))

    def _say(self, message: ToDaemon) -> None:
        _say(self._connection, message)


def _say(connection: socket.socket, message: ToDaemon) -> None:
    """Send, and wait for room: the daemon always reads."""
    while True:
        try:
            send(connection, message)
            return
        except BlockingIOError:
            select.select([], [connection], [])


def _ordinal(driver: Driver, uuid: bytes) -> int:
    """The GPU's number in this process, which is the only one that knows it by a number."""
    for ordinal in range(driver.device_count()):
        if driver.device_uuid(ordinal) == uuid:
            return ordinal
    raise CudaUnavailable(
        f"the daemon sees {driver.device_count()} GPUs, and GPU-{UUID(bytes=uuid)} is none of them;"
        " start it with the same CUDA_VISIBLE_DEVICES, or in a container with the same GPUs"
    )


def _tie_to(parent: int) -> None:
    """Have the kernel end this process with the daemon; leave signals of a group to the daemon."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main(fd: int, uuid: bytes, parent: int) -> None:
    """Be the process.

    Args:
        fd: The connection to the daemon, inherited.
        uuid: The GPU's.
        parent: The daemon's pid.
    """
    _tie_to(parent)
    set_up("info")
    connection = socket.socket(fileno=os.dup(fd))  # a low number, which select can take
    os.close(fd)
    connection.setblocking(False)
    with connection, contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
        try:
            driver = load()
            stack.enter_context(driver.on(_ordinal(driver, uuid)))
        except (CudaUnavailable, CudaError) as error:
            _say(connection, Ready(str(error)))
            return
        try:
            GpuServer(driver, connection).run()
        except CudaError as error:
            _log.error("the process of GPU-%s is of no use any more: %s", UUID(bytes=uuid), error)
            os._exit(1)  # CUDA's own clean-up may wait for what will never end


if __name__ == "__main__":
    main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
