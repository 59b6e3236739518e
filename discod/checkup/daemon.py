"""The socket directory and the daemon behind it: is it there, alive, ours to use, and as we are.

Where a service manager holds the sockets, asking starts the daemon.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from discod import __version__
from discod.asking import DaemonRefuses, NoAnswer, NotListening, conversation
from discod.checkup.finding import Finding, fail, ok, warn
from discod.socket_dir import check_directory
from discod.wire import PROTOCOL_VERSION
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import StatusReply, StatusRequest, Welcome
from discod.wire.paths import SocketPathTooLong, socket_paths
from discod.wire.sizes import format_size

ANSWER_SECONDS = 1.0
"""Of each packet; the command as a whole has 2 s."""


@dataclass(slots=True)
class Daemon:
    """What was seen.

    Attributes:
        socket_dir: Where it was looked for.
        welcome: How it greets; None: it does not.
        uid: Whose it is, None: not known.
        pid: As it is seen from here; 0: it is in another pid namespace.
        status: What it says of itself.
        error: Why there is no greeting.
    """

    socket_dir: Path
    welcome: Welcome | None = None
    uid: int | None = None
    pid: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


def look_for_daemon(socket_dir: Path) -> Daemon:
    """Ask the daemon for its status, if one answers."""
    daemon = Daemon(socket_dir)
    try:
        with conversation(socket_dir, "status", ANSWER_SECONDS) as (connection, welcome):
            daemon.pid, daemon.uid = _owner(connection, welcome)
            send_message(connection, StatusRequest())
            daemon.status = json.loads(receive_message(connection, StatusReply)[0].json)
            daemon.welcome = welcome
    except (NoAnswer, SocketPathTooLong) as error:
        daemon.error = error
    return daemon


def _owner(connection: socket.socket, welcome: Welcome) -> tuple[int, int | None]:
    """The daemon's pid and uid, as far as they are seen from here.

    The kernel names whoever made the socket. That is a service manager where it hands the daemon
    its sockets, and pid 0 where the daemon is in a pid namespace that is not seen from here.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    if pid == 0 or _is_discod(pid):
        return pid, uid
    if _is_discod(welcome.pid):
        with contextlib.suppress(OSError):
            return welcome.pid, os.stat(f"/proc/{welcome.pid}").st_uid
    return 0, None


def _is_discod(pid: int) -> bool:
    try:
        return b"discod" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def check_daemon(daemon: Daemon) -> Iterator[Finding]:
    """The findings."""
    try:
        attach_path, io_path = socket_paths(daemon.socket_dir)
    except SocketPathTooLong as error:
        yield fail("socket directory", str(error), "choose a shorter --socket-dir")
        return
    yield _directory(daemon)
    if daemon.welcome is not None:
        yield from _alive(daemon, daemon.welcome, io_path)
    elif isinstance(daemon.error, DaemonRefuses):
        yield fail("daemon", str(daemon.error), _OWN_DAEMON)
    elif isinstance(daemon.error, NotListening):
        yield from _absent(daemon.socket_dir, (attach_path, io_path))
    elif daemon.error is not None:
        yield _silent(daemon.error, attach_path)


_OWN_DAEMON = "or start a daemon of your own with its own --scratch and --socket-dir"


def _directory(daemon: Daemon) -> Finding:
    check, path = "socket directory", daemon.socket_dir
    try:
        status = path.stat()
    except FileNotFoundError:
        parent = next(one for one in path.absolute().parents if one.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return ok(check, f"{path} is not there yet: the daemon makes it")
        found = f"{path} is not there, and uid {os.geteuid()} cannot make it in {parent}"
        remedy = "make it as root and give it to the daemon's user, or choose another --socket-dir"
        return warn(check, found, remedy)
    except OSError as error:
        return fail(check, f"{path}: {error.strerror}", "choose another --socket-dir")
    whose = f"{path}, uid {status.st_uid}, gid {status.st_gid}, mode {status.st_mode & 0o7777:04o}"
    if daemon.welcome is not None:
        return ok(check, whose)
    if not stat.S_ISDIR(status.st_mode):
        return fail(check, f"{path} is no directory", "choose another --socket-dir")
    try:
        check_directory(status)
    except OSError as error:
        found = f"{path}: {error.strerror}; a daemon of uid {os.geteuid()} does not start with it"
        return warn(check, found, "choose another --socket-dir (DISCOD_SOCKET_DIR)")
    if not os.access(path, os.W_OK | os.X_OK):
        found = f"{whose}: uid {os.geteuid()} cannot make sockets in it"
        return warn(check, found, "give it to this user (chown), or choose another --socket-dir")
    return ok(check, whose)


def _alive(daemon: Daemon, welcome: Welcome, io_path: Path) -> Iterator[Finding]:
    pid = f"pid {daemon.pid}" if daemon.pid else "its pid is not seen from here"
    yield ok("daemon", f"discod {welcome.version} answers, {pid}, {_user(daemon.uid)}")
    if welcome.version != __version__:
        yield warn(
            "versions",
            f"the daemon is {welcome.version}, this is {__version__}; both have protocol "
            f"{welcome.protocol}",
            "restart the daemon, with the version that is installed; running jobs go on",
        )
    else:
        yield ok("versions", f"both {__version__}, protocol {PROTOCOL_VERSION}")
    uid = os.geteuid()
    if uid == 0 and daemon.uid not in (0, None):
        remedy = f"run trainers as uid {daemon.uid}, or as a member of its --allow-group"
        yield warn(
            "access", f"root may see its status, and may not attach ({_whose(daemon)})", remedy
        )
    else:
        yield ok("access", f"uid {uid} may attach ({_whose(daemon)})")
    if not io_path.is_socket():
        remedy = "restart the daemon: running jobs go on"
        yield fail("I/O socket", f"{io_path} is gone: no client can attach", remedy)
    yield _arenas(welcome)
    for directory in daemon.status.get("scratch", ()):
        yield _scratch(directory)


def _whose(daemon: Daemon) -> str:
    return "it is its own" if daemon.uid == os.geteuid() else f"it is {_user(daemon.uid)}'s"


def _user(uid: int | None) -> str:
    return "an unknown user" if uid is None else f"uid {uid}"


def _arenas(welcome: Welcome) -> Finding:
    free, total = format_size(welcome.ram_free_bytes), format_size(welcome.ram_bytes)
    if welcome.ram_free_bytes < welcome.ram_bytes // 10:
        found = f"{free} of {total} (--ram) are left: a new client may be refused"
        return warn("arenas", found, "end clients (discod status), or restart it with more --ram")
    return ok("arenas", f"{free} of {total} (--ram) are left")


def _scratch(directory: dict[str, Any]) -> Finding:
    check, subject = "the daemon's", str(directory.get("path"))
    if not directory.get("in_use"):
        remedy = "see the machine's log (dmesg); it comes back by itself when it works again"
        return fail(check, f"out of use: {directory.get('last_failure')}", remedy, subject)
    free = format_size(int(directory.get("free_bytes", 0)))
    if not directory.get("direct"):
        found = f"in use, buffered: O_DIRECT does not work on {directory.get('fs_type')}"
        return warn(check, f"{found}; {free} free", "choose ext4 or xfs on a local disk", subject)
    return ok(check, f"in use with O_DIRECT; {free} free", subject)


def _absent(socket_dir: Path, paths: tuple[Path, ...]) -> Iterator[Finding]:
    stale = [path for path in paths if path.is_socket()]
    if stale:
        names = ", ".join(path.name for path in stale)
        yield warn(
            "daemon",
            f"none runs, and {names} in {socket_dir} are left by one that was killed",
            f"start a daemon, which removes them: discod --scratch DIR --socket-dir {socket_dir}",
        )
    else:
        yield warn(
            "daemon",
            f"none runs on {socket_dir}",
            f"start one: discod --scratch DIR --socket-dir {socket_dir}; or set DISCOD_SCRATCH for "
            "the trainers, which then start it",
        )


def _silent(error: Exception, attach_path: Path) -> Finding:
    cause = error.__cause__
    if isinstance(cause, PermissionError):
        found = f"uid {os.geteuid()} may not connect to {attach_path}{_modes(attach_path)}"
        remedy = f"have its owner allow a group of yours (--allow-group), {_OWN_DAEMON}"
        return fail("daemon", found, remedy)
    if isinstance(cause, TimeoutError) or getattr(cause, "errno", 0) == errno.EAGAIN:
        return fail(
            "daemon",
            f"it listens on {attach_path}, and has not answered within {ANSWER_SECONDS:.0f} s",
            "see whether it is stopped (kill -CONT), or kill and restart it: running jobs go on",
        )
    return fail("daemon", str(error), "restart it: running jobs go on")


def _modes(path: Path) -> str:
    """Who may, as far as it can be seen."""
    for one in (path, path.parent):
        try:
            status = one.stat()
        except OSError:
            continue
        mode = f"{status.st_mode & 0o7777:04o}"
        return f" ({one.name} is uid {status.st_uid}'s, gid {status.st_gid}, mode {mode})"
    return ""
