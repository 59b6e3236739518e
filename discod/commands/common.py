"""What the subcommands share: ``--socket-dir``, asking the daemon, and ending with an exit code."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from discod.exits import Exit
from discod.wire.paths import SocketPathTooLong, default_socket_dir

socket_dir = click.option(
    "--socket-dir",
    type=click.Path(path_type=Path),
    envvar="DISCOD_SOCKET_DIR",
    help="Directory of the daemon's sockets, which clients find it by.  "
    "[default: /run/discod, else $XDG_RUNTIME_DIR/discod, else one in the temp dir]",
)


def fail(text: object, code: Exit) -> NoReturn:
    """End with a message on stderr."""
    click.echo(f"discod: {text}", err=True)
    sys.exit(code)


def ask_status(directory: Path | None) -> dict[str, Any]:
    """The daemon's status, in the form of :func:`discod.status.make_status`; ends without one."""
    from discod.status import NoStatus, fetch_status

    try:
        status = json.loads(fetch_status(directory or default_socket_dir()))
    except SocketPathTooLong as error:
        fail(error, Exit.SOCKET_PATH_TOO_LONG)
    except NoStatus as error:
        fail(error, Exit.NO_DAEMON)
    if not isinstance(status, dict):
        fail("the daemon's status is no object", Exit.NO_DAEMON)
    return status
