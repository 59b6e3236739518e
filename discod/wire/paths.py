"""Where the sockets are: the directory, the names in it, and the limit on their length."""

import os
import tempfile
from pathlib import Path

ATTACH_SOCKET = "attach.sock"
IO_SOCKET = "io.sock"

SOCKET_PATH_MAX_BYTES = 107
"""Linux: ``sockaddr_un.sun_path`` is 108 bytes with its final NUL (unix(7))."""


class SocketPathTooLong(ValueError):
    """A socket's path would be over :data:`SOCKET_PATH_MAX_BYTES`."""


def default_socket_dir() -> Path:
    """``/run/discod`` when usable, else ``$XDG_RUNTIME_DIR/discod``, else one in the temp dir.

    "Usable": a socket is there that this process may connect to, as a service has made it for its
    group; or this process may write there, or make it. The last one is named after the user's uid,
    and is made with mode 0700 by the daemon.
    """
    system = Path("/run/discod")
    if os.access(system / ATTACH_SOCKET, os.W_OK) or os.access(
        system if system.exists() else system.parent, os.W_OK
    ):
        return system
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "discod"
    return Path(tempfile.gettempdir()) / f"discod-{os.getuid()}"


def socket_paths(socket_dir: Path) -> tuple[Path, Path]:
    """The attach socket's and the I/O socket's path in ``socket_dir``, made absolute.

    Raises:
        SocketPathTooLong: Either is over the limit; the text names path, length and remedy.
    """
    base = Path(os.path.abspath(socket_dir))
    paths = base / ATTACH_SOCKET, base / IO_SOCKET
    for path in paths:
        length = len(os.fsencode(path))
        if length > SOCKET_PATH_MAX_BYTES:
            raise SocketPathTooLong(
                f"socket path {path} has {length} bytes, and a unix socket's path may have "
                f"{SOCKET_PATH_MAX_BYTES}; choose a shorter --socket-dir (DISCOD_SOCKET_DIR)"
            )
    return paths
