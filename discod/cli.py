"""The command line: ``discod`` runs the daemon; its subcommands are in :mod:`discod.commands`.

Only what the help text needs is imported at the top; the daemon starts in a fraction of a second.
"""

import sys
from pathlib import Path

import click
from click.core import ParameterSource

from discod import __version__
from discod.checksum import Mode
from discod.commands import Commands, common
from discod.config import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_THREADS,
    DISK_SHARE,
    FIRST_CLIENT_SECONDS,
    RAM_SHARE,
    Address,
    WriteRate,
    parse_address,
    parse_write_rate,
)
from discod.logs import LEVELS
from discod.wire.paths import default_socket_dir
from discod.wire.sizes import parse_size


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from error


def _write_rate(
    context: click.Context, option: click.Parameter, value: str | None
) -> WriteRate | None:
    try:
        return None if value is None else parse_write_rate(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from error


def _address(context: click.Context, option: click.Parameter, value: str | None) -> Address | None:
    try:
        return None if value is None else parse_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from error


def _directories(
    context: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> tuple[Path, ...]:
    if "" in value:  # a variable that is not set in somebody's script; Path would read "here"
        raise click.BadParameter("an empty name is no directory", context, option)
    return tuple(Path(text) for text in value)


def _groups(
    context: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> tuple[int, ...]:
    from discod.permits import UnknownGroup, group_number

    names = [name.strip() for text in value for name in text.split(",")]
    try:
        if any(names):
            names = [name for name in names if name]
        return tuple(dict.fromkeys(map(group_number, names)))
    except UnknownGroup as error:
        raise click.BadParameter(str(error), context, option) from error


@click.group(cls=Commands, invoke_without_command=True)
@click.option(
    "--scratch",
    type=click.Path(),
    callback=_directories,
    multiple=True,
    envvar="DISCOD_SCRATCH",
    help="Directory on NVMe to keep activations in; give it once per device to stripe over. "
    "DISCOD_SCRATCH separates several by ':'.",
)
@common.socket_dir
@click.option(
    "--ram",
    callback=_size,
    metavar="SIZE",
    envvar="DISCOD_RAM",
    help=f"Most memory for all clients' arenas.  [default: {RAM_SHARE:.0%} of what is available]",
)
@click.option(
    "--disk",
    callback=_size,
    metavar="SIZE",
    envvar="DISCOD_DISK",
    help=f"Most scratch space for all clients.  [default: {DISK_SHARE:.0%} of what is free]",
)
@click.option(
    "--write-budget",
    callback=_write_rate,
    metavar="SIZE/TIME",
    envvar="DISCOD_WRITE_BUDGET",
    help="Most bytes that all clients together write to disk in any day or hour, as 2TB/day or "
    "100GB/hour; what is over it stays in RAM or waits.  [default: no limit]",
)
@click.option(
    "--threads",
    type=int,
    default=DEFAULT_THREADS,
    envvar="DISCOD_THREADS",
    show_default=True,
    help="I/O threads per device, at least 2.",
)
@click.option(
    "--chunk",
    callback=_size,
    metavar="SIZE",
    default=f"{DEFAULT_CHUNK_BYTES >> 20}MiB",
    show_default=True,
    envvar="DISCOD_CHUNK",
    help="Most bytes that a thread reads or writes at a time; up to 16MiB it may be twice that "
    "while no trainer has had to wait for a read lately.",
)
@click.option(
    "--checksum",
    type=click.Choice([mode.value for mode in Mode]),
    default=Mode.SAMPLED.value,
    envvar="DISCOD_CHECKSUM",
    show_default=True,
    help="Verify what is read: a page per MiB, every byte (0.1 CPU-s/GB), or nothing.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="info",
    envvar="DISCOD_LOG_LEVEL",
    show_default=True,
    help="Log this and what is worse, on stderr.",
)
@click.option(
    "--exit-idle",
    type=float,
    default=0.0,
    envvar="DISCOD_EXIT_IDLE",
    metavar="SECONDS",
    help="Exit after so long without a client, and not before the first one has had "
    f"{FIRST_CLIENT_SECONDS:.0f} s to come; 0: never.  [default: 0]",
)
@click.option(
    "--allow-group",
    callback=_groups,
    multiple=True,
    envvar="DISCOD_ALLOW_GROUP",
    metavar="GROUP",
    help="Serve the members of this group too, by name or number; may be given several times. "
    "DISCOD_ALLOW_GROUP separates several by ','.  [default: only the daemon's own user]",
)
@click.option(
    "--metrics",
    callback=_address,
    metavar="HOST:PORT",
    envvar="DISCOD_METRICS",
    help="Serve metrics for Prometheus there, as 127.0.0.1:9478, to whoever can reach it.  "
    "[default: no metrics]",
)
@click.version_option(__version__, prog_name="discod")
@click.pass_context
def main(
    context: click.Context,
    scratch: tuple[Path, ...],
    socket_dir: Path | None,
    ram: int | None,
    disk: int | None,
    write_budget: WriteRate | None,
    threads: int,
    chunk: int,
    checksum: str,
    log_level: str,
    exit_idle: float,
    allow_group: tuple[int, ...],
    metrics: Address | None,
) -> None:
    """Keep training activations on NVMe: run the daemon that does all of a node's disk I/O.

    It runs in the foreground until SIGTERM or Ctrl-C.
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return
    from discod.config import BadOption, Config

    try:
        config = Config(
            scratch=scratch,
            socket_dir=socket_dir or default_socket_dir(),
            ram_bytes=ram,
            disk_bytes=disk,
            write_budget=write_budget,
            threads=threads,
            chunk_bytes=chunk,
            checksum=Mode(checksum),
            log_level=log_level,
            exit_idle_seconds=exit_idle,
            allow_gids=allow_group,
            metrics=metrics,
        )
    except BadOption as error:
        raise click.UsageError(str(error)) from error
    from discod.exits import StartupError
    from discod.logs import set_up
    from discod.server import Server

    set_up(log_level)
    try:
        server = Server(config)
    except StartupError as error:
        click.echo(f"discod: {error}", err=True)
        sys.exit(error.code)
    sys.exit(server.run())


def _refuse_options_before(context: click.Context) -> None:
    """What is given before a subcommand is the daemon's, and none is started."""
    for name in context.params:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{option} before {context.invoked_subcommand!r} is an option of the daemon, which "
                f"is not started here; options of {context.invoked_subcommand!r} come after it"
            )
