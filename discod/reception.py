"""The attach listener: who is accepted, how many at a time, and who is put out again.

What is said in the conversation is in :mod:`discod.attach`, what comes of it in
:mod:`discod.clients`.
"""

import errno
import logging
import socket
from collections import Counter

from discod.attach import Handshake, Host
from discod.io_connections import Owner
from discod.logs import RateLimited
from discod.loop import Loop

ACCEPTS_PER_ROUND = 64
"""Then the loop looks after the others, however many are waiting to get in."""

ACCEPT_PAUSE_SECONDS = 0.5
"""At most, after running out of fds: the listener would wake the loop without end."""

_pauses = RateLimited(logging.getLogger(__name__))


class Reception:
    """All conversations that have not ended.

    Args:
        loop: The event loop.
        host: Whom they are with.
        most: Conversations at a time.
        listener: The attach socket.
    """

    def __init__(self, loop: Loop, host: Host, most: int, listener: socket.socket) -> None:
        self._loop = loop
        self._host = host
        self._most = most
        self._listener = listener
        self._handshakes: dict[Handshake, None] = {}  # in the order in which they came
        self._accepting = True
        self._paused = False
        loop.add_reader(listener.fileno(), self._accept)

    def __len__(self) -> int:
        return len(self._handshakes)

    def close(self) -> None:
        """Close the listener and drop whoever has not got in yet. Idempotent."""
        if self._accepting:
            self._accepting = False
            if not self._paused:
                self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            for handshake in list(self._handshakes):
                handshake.drop()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            if len(self._handshakes) >= self._most and not self._evict():
                self._pause(f"{self._most} others are attaching")
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self._pause(str(error))
                    return
                continue  # that connection was gone already
            try:
                handshake = Handshake(self._loop, self._host, connection, self._ended)
            except OSError as error:
                connection.close()
                self._pause(str(error))
                return
            self._handshakes[handshake] = None

    def _evict(self) -> bool:
        """Drop the oldest unfinished conversation of the process that has most of them.

        An honest client is through with its own in milliseconds, and has one. So whoever opens
        connections and leaves them unfinished only gets in his own way.
        """
        unfinished = [handshake for handshake in self._handshakes if not handshake.asked]
        if not unfinished:
            return False
        (owner, _), *_ = Counter(map(owner_of, unfinished)).most_common(1)
        oldest = next(handshake for handshake in unfinished if owner_of(handshake) == owner)
        oldest.refuse(f"{len(self._handshakes)} attaches are unfinished, most of yours; try again")
        return True

    def _pause(self, reason: str) -> None:
        """Accept nobody until a connection ends or some time has passed."""
        _pauses.warning("attaches wait: %s", reason)
        self._paused = True
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        if self._paused and self._accepting:
            self._paused = False
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _ended(self, handshake: Handshake) -> None:
        self._handshakes.pop(handshake, None)
        if self._paused:
            self._loop.post(self._go_on)  # when its fd is closed


def owner_of(handshake: Handshake) -> Owner:
    """Whom the conversation is with: pid and uid."""
    return handshake.peer.pid, handshake.peer.uid
