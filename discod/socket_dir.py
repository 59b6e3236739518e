"""The directory of the daemon's two sockets: made, locked, and cleared of what is stale."""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from discod.exits import Exit, StartupError
from discod.locks import Locked, lock_directory
from discod.wire.paths import SocketPathTooLong, socket_paths

BACKLOG = 1024
"""Connections that may wait: every rank of a node connects at the same moment."""


class SocketDir:
    """The socket directory, locked for this process's life.

    Args:
        path: Made with mode 0700 where it is missing.

    Raises:
        StartupError: It cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.attach_path, self.io_path = socket_paths(path)
        except SocketPathTooLong as error:
            raise StartupError(Exit.SOCKET_PATH_TOO_LONG, f"{error}; not started") from error
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = lock_directory(path)
            self._check_owner()
            for socket_path in (self.attach_path, self.io_path):
                self._remove_stale(socket_path)
        except Locked as error:
            raise StartupError(
                Exit.SOCKET_LOCKED,
                f"socket directory {path} is in use by another daemon ({error.holder}): not "
                "started; use that daemon, stop it, or choose another --socket-dir",
            ) from error
        except OSError as error:
            raise self.unusable(error) from error

    def listen(self) -> socket.socket:
        """The attach socket, accepting connections from now on. Raises ``StartupError``."""
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        umask = os.umask(0o177)
        try:
            listener.bind(str(self.attach_path))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise self.unusable(error) from error
        finally:
            os.umask(umask)
        return listener

    def remove_sockets(self) -> None:
        """Unlink both sockets; never raises."""
        for path in (self.attach_path, self.io_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def unusable(self, error: OSError) -> StartupError:
        """The start-up error for a failure in the directory."""
        return StartupError(
            Exit.SOCKET_DIR_UNUSABLE,
            f"socket directory {self.path} cannot be used: {error.strerror} (errno {error.errno});"
            " not started; choose another --socket-dir (DISCOD_SOCKET_DIR)",
        )

    def _check_owner(self) -> None:
        # In /tmp anyone can make the directory first, and would then own our sockets' names.
        if os.fstat(self._lock_fd).st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, "it belongs to another user")

    def _remove_stale(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise OSError(errno.EEXIST, f"{path.name} in it is not a socket")
            path.unlink()
