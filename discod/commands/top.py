"""``discod top``: the daemon's state, again and again, until q or Ctrl-C."""

import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from discod.commands import common

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="Print one frame, with all clients, and end.")
@common.socket_dir
def command(interval: float, once: bool, socket_dir: Path | None) -> None:
    """Show the daemon's scratch directories and clients live; q ends it."""
    from rich.console import Console

    from discod.top import frame

    console = Console()
    if once:
        for line in frame(common.ask_status(socket_dir), _clock(), console.width):
            console.print(line, soft_wrap=True)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "stdin and stdout must be a terminal, since the screen is redrawn and q is read; "
            "'discod top --once' prints one frame, and 'discod status --json' is for scripts"
        )
    from discod.wire.paths import SocketPathTooLong, default_socket_dir, socket_paths

    directory = socket_dir or default_socket_dir()
    try:
        socket_paths(directory)
    except SocketPathTooLong as error:
        from discod.exits import Exit

        common.fail(error, Exit.SOCKET_PATH_TOO_LONG)
    with contextlib.suppress(KeyboardInterrupt):
        _watch(console, directory, interval)


def _watch(console: "Console", directory: Path, interval: float) -> None:
    from rich.console import Group
    from rich.live import Live

    signal.signal(signal.SIGTERM, _end)  # so that the terminal is put back
    with _keys() as fd, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = _look(directory, console.width, console.height)
            live.update(Group(*lines), refresh=True)
            if _asked_to_end(fd, interval):
                return


def _look(directory: Path, width: int, height: int) -> "list[Text]":
    from discod.status import NoStatus, fetch_status
    from discod.top import frame, waiting

    try:
        status = json.loads(fetch_status(directory))
    except NoStatus as error:
        return waiting(str(error), _clock(), width)
    return frame(status, _clock(), width, height)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """The terminal gives each key at once, and does not show it."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _asked_to_end(fd: int, seconds: float) -> bool:
    """Whether q was pressed, or the terminal is gone, within ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            keys = os.read(fd, 64)
            if not keys or b"q" in keys.lower():
                return True
    return False


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
