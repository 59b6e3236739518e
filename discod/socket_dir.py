"""The directory of the daemon's two sockets: made, locked, and cleared of what is stale."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from discod.activation import Passed
from discod.exits import Exit, StartupError
from discod.locks import Locked, lock_directory
from discod.wire.paths import SocketPathTooLong, socket_paths

BACKLOG = 1024
"""Connections that may wait: every rank of a node connects at the same moment."""


class SocketDir:
    """The socket directory, locked for this process's life.

    Args:
        path: Made where it is missing. One that is there, as a service manager makes it, keeps its
            owner and mode.
        gids: Groups whose members may attach. The modes of the sockets, and of a directory made
        here,
            are exact, whatever the umask is:

            - none: sockets 0600, directory 0700;
            - one: sockets 0660 of that group, directory 0710 of that group;
            - several: sockets 0666, directory 0711. A socket has one group, so that here the check
              of the peer's credentials (:mod:`discod.permits`) stands alone.
        passed: Sockets in it that somebody else has made: they are used as they are.

    Raises:
        StartupError: It cannot be used.
    """

    def __init__(self, path: Path, gids: Sequence[int] = (), passed: Passed | None = None) -> None:
        self.path = path
        self._gids = gids
        self._passed = passed
        try:
            self.attach_path, self.io_path = socket_paths(path)
        except SocketPathTooLong as error:
            raise StartupError(Exit.SOCKET_PATH_TOO_LONG, f"{error}; not started") from error
        try:
            made = self._make()
            self._lock_fd = lock_directory(path)
            if made:
                self._let_clients_in(self._lock_fd, (0o700, 0o710, 0o711))
            check_directory(os.fstat(self._lock_fd))
            if passed is None:
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
        if self._passed is not None:
            return self._passed.attach
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

    def open_to_clients(self) -> None:
        """Give both sockets, which are bound by now, their group and mode. Raises
        ``StartupError``."""
        if self._passed is not None:
            return
        try:
            for path in (self.attach_path, self.io_path):
                self._let_clients_in(path, (0o600, 0o660, 0o666))
        except OSError as error:
            raise self.unusable(error) from error

    def remove_sockets(self) -> None:
        """Unlink both sockets, unless they were passed; never raises."""
        if self._passed is not None:
            return
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

    def _make(self) -> bool:
        """Make the directory; whether it was not there."""
        umask = os.umask(0o022)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            return False
        finally:
            os.umask(umask)
        return True

    def _let_clients_in(self, what: int | Path, modes: tuple[int, int, int]) -> None:
        """Set group and mode: ``modes`` are for no group, one, and several."""
        if len(self._gids) == 1:
            try:
                os.chown(what, -1, self._gids[0])
            except PermissionError as error:
                raise OSError(
                    error.errno,
                    f"uid {os.geteuid()} may not give it to gid {self._gids[0]}, "
                    "because it is not in that group",
                ) from error
        os.chmod(what, modes[min(len(self._gids), 2)])

    def _remove_stale(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise OSError(errno.EEXIST, f"{path.name} in it is not a socket")
            path.unlink()


def check_directory(status: os.stat_result) -> None:
    """Raise ``OSError`` when others could put sockets of theirs in place of ours."""
    # In /tmp anyone can make the directory first, and would then own our sockets' names.
    if status.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to another user, uid {status.st_uid}")
    # Our own group is ours.
    others = 0o002 if status.st_gid == os.getegid() else 0o022
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        raise OSError(
            errno.EPERM,
            f"others may write to it, by its mode {status.st_mode & 0o7777:04o} (chmod go-w)",
        )
