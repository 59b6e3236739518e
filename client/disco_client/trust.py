"""Whose socket it is: which ones this process connects to, and why it may not connect to others.

A client hands its arena over, so it must not take another user's socket for the daemon's. Trusted
is

1. a socket of this process's own user or of root; and
2. a socket of another user, such as a service's, where root (or this user) must have put it: it
   belongs to the owner of its directory, and every directory above that one belongs to root or to
   this user and cannot be written to by anybody else. Symbolic links are followed one at a time,
   and what is above each and above its target has to be so too.

In ``/tmp`` only (1) can hold: anybody can make directories and links there. That the process which
listens is the socket's owner is checked after connecting, by what the kernel says of it.
"""

import os
import socket
import stat
import struct
from pathlib import Path

from disco_client.errors import SocketForbidden

_OTHERS_WRITE = 0o022
_MOST_LINKS = 40
"""As many as the kernel follows."""


class _Untrusted(Exception):
    """A directory in which others could have put the socket; the text says which, and why."""


def check_path(path: Path) -> int:
    """The uid of the owner that a socket may be trusted to be of.

    Raises:
        SocketForbidden: It may be another user's, who wants to be taken for the daemon.
        OSError: It cannot be looked at.
    """
    status = os.stat(path)
    if _ours(status.st_uid):
        return status.st_uid
    try:
        directory = _resolve(path.parent)
        _check_directory(directory, status.st_uid)
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise _Untrusted(f"{path} is a symbolic link")
    except _Untrusted as reason:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise SocketForbidden(
            f"socket {path} belongs to uid {status.st_uid} ({mode}), not to root or uid "
            f"{os.geteuid()}, and {reason}: not connecting to it, since any user could have "
            "made it. A daemon of another user needs its socket directory where only root can make "
            "one, such as /run/discod; or start a daemon of your own with connect(scratch=DIR)"
        ) from None
    return status.st_uid


def check_peer(connection: socket.socket, path: Path, owner: int) -> None:
    """Raise :class:`SocketForbidden` unless root, we or the socket's owner listen on it."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != owner and not _ours(uid):
        raise SocketForbidden(
            f"pid {pid} of uid {uid} listens on socket {path}, which belongs to uid {owner}: not "
            "attaching to it; start the daemon there again"
        )


def describe_refusal(path: Path) -> str:
    """What keeps this process out of ``path``: the first thing on the way that it may not pass."""
    for part in (*reversed(path.parents), path):
        try:
            status = os.stat(part)
        except OSError:
            break
        needed = os.W_OK if part == path else os.X_OK
        if not os.access(part, needed, effective_ids=True):
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
            return f"{part} has {mode}, owner uid {status.st_uid} and group gid {status.st_gid}"
    return f"{path.parent} cannot be looked into"


def _ours(uid: int) -> bool:
    return uid in (0, os.geteuid())


def _resolve(directory: Path) -> Path:
    """The real path of a directory, of which all that is above it is trusted."""
    todo = list(reversed(Path(os.path.abspath(directory)).parts[1:]))
    at = Path("/")
    links = 0
    while todo:
        name = todo.pop()
        if name == "..":
            at = at.parent
            continue
        _check_above(at)
        entry = at / name
        if not stat.S_ISLNK(os.lstat(entry).st_mode):
            at = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise _Untrusted(f"{directory} has more than {_MOST_LINKS} symbolic links")
        target = Path(os.readlink(entry))
        if target.is_absolute():
            at = Path("/")
        todo += reversed([part for part in target.parts if part != "/"])
    return at


def _check_above(directory: Path) -> None:
    status = os.lstat(directory)
    if not _ours(status.st_uid):
        raise _Untrusted(f"{directory}, above it, belongs to uid {status.st_uid}")
    if status.st_mode & _OTHERS_WRITE:
        raise _Untrusted(
            f"{directory}, above it, can be written to by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o})"
        )


def _check_directory(directory: Path, owner: int) -> None:
    status = os.lstat(directory)
    if status.st_uid != owner and not _ours(status.st_uid):
        raise _Untrusted(f"its directory {directory} belongs to uid {status.st_uid}")
    if status.st_mode & _OTHERS_WRITE:
        raise _Untrusted(
            f"its directory {directory} can be written to by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o})"
        )
