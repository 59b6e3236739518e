"""Which processes the daemon serves, by what the kernel says of them: uid and groups.

The modes of the sockets and of their directory keep others out before that
(:mod:`discod.socket_dir`); this check holds whatever these are.
"""

import ctypes
import grp
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

_libc = ctypes.CDLL(None, use_errno=True)
_SO_PEERGROUPS = 59
_MOST_GROUPS = 1 << 16
"""As many as Linux lets a process have (NGROUPS_MAX)."""


class UnknownGroup(ValueError):
    """There is no such group; the text names it."""


def group_number(text: str) -> int:
    """The gid of a group's name or number. Raises :class:`UnknownGroup`."""
    if text.isdecimal() and len(text) < 10:
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        raise UnknownGroup(
            f"there is no group {text!r} on this machine (or in this container); create it, or "
            "give its number"
        ) from None


@dataclass(frozen=True, slots=True)
class Permits:
    """Who may attach: the daemon's own user, and the members of these groups.

    Root may ask for the status, and no more: it is not needed as a client, and its trainers would
    lend their arenas to whoever runs the daemon.
    """

    gids: Sequence[int] = ()

    def may_attach(self, connection: socket.socket, uid: int, gid: int) -> bool:
        """Whether the process at the other end is one of those."""
        if uid == os.geteuid() or gid in self.gids:
            return True
        return bool(self.gids) and not set(self.gids).isdisjoint(_groups(connection))

    def may_ask(self, connection: socket.socket, uid: int, gid: int) -> bool:
        """Whether it may have the daemon's status."""
        return uid == 0 or self.may_attach(connection, uid, gid)

    def who(self) -> str:
        """Those who may attach, in words."""
        text = f"uid {os.geteuid()}"
        if self.gids:
            text += " and members of " + ", ".join(f"gid {gid}" for gid in self.gids)
        return text


def _groups(connection: socket.socket) -> Sequence[int]:
    """The supplementary groups that the peer had when it connected (unix(7)); none if unknown."""
    buffer = (ctypes.c_uint32 * _MOST_GROUPS)()  # Python's getsockopt stops at 256 of them
    size = ctypes.c_uint32(ctypes.sizeof(buffer))
    failed = _libc.getsockopt(
        connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, buffer, ctypes.byref(size)
    )
    return [] if failed else buffer[: size.value // 4]
