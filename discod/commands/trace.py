"""``discod trace``: the last I/O calls and waits, as a file for Perfetto or chrome://tracing."""

import contextlib
import gzip
import json
import os
import time
from pathlib import Path
from typing import IO, Any, cast

import click

from discod.commands import common
from discod.exits import Exit

_PATH = click.Path(path_type=Path)


@click.command()
@click.option(
    "-o",
    "--out",
    type=_PATH,
    required=True,
    help="The file to write; compressed when its name ends in .gz.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="How far to go back, as far as the daemon keeps it: its last 65,536 I/O calls.  "
    "[default: 10]",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Record the next so many seconds instead; Ctrl-C ends it earlier.",
)
@click.option(
    "--merge",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file that torch.profiler exported in the same time: lay both into one.",
)
@common.socket_dir
def command(
    out: Path,
    seconds: float | None,
    wait: float | None,
    merge: Path | None,
    socket_dir: Path | None,
) -> None:
    """Write the daemon's last I/O calls, and its clients' waits, as a trace."""
    if seconds is not None and wait is not None:
        raise click.UsageError("--seconds looks back and --wait ahead: give one of them")
    if merge is not None and out.exists() and out.samefile(merge):
        raise click.UsageError(f"--out {out} is the file to be merged: name another one")
    profile = None if merge is None else _read(merge)
    since_ns = time.monotonic_ns() - int((seconds or 10.0) * 1e9)
    if wait is not None:
        since_ns = time.monotonic_ns()
        common.ask_status(socket_dir)  # at once, and not after the wait, when there is no daemon
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(wait)
    from discod.asking import NoAnswer
    from discod.trace import fetch_trace
    from discod.trace_events import base_ns, make_trace, total_bytes
    from discod.trace_events import merge as merged
    from discod.wire.paths import SocketPathTooLong, default_socket_dir
    from discod.wire.sizes import format_size

    try:
        trace = fetch_trace(socket_dir or default_socket_dir())
    except SocketPathTooLong as error:
        common.fail(error, Exit.SOCKET_PATH_TOO_LONG)
    except NoAnswer as error:
        common.fail(error, Exit.NO_DAEMON)
    if profile is None:
        made = make_trace(trace, since_ns, base_ns(time.time_ns()))
    else:
        try:
            made = merged(profile, trace, since_ns)
        except ValueError as error:
            raise click.UsageError(f"--merge {merge}: {error}") from error
    _write(out, made)
    calls = [record for _, part in trace.devices for record in part.since(since_ns)]
    waits = trace.waits.since(since_ns)
    click.echo(
        f"{out}: {len(calls)} I/O calls ({format_size(total_bytes(calls))}) and {len(waits)} waits "
        f"of the last {(time.monotonic_ns() - since_ns) / 1e9:.1f} s; open it in ui.perfetto.dev "
        "or chrome://tracing"
    )
    if not all(part.reaches(since_ns) for part in (trace.waits, *(p for _, p in trace.devices))):
        click.echo(
            "discod: the daemon keeps no more than that: what came before is missing; ask for "
            "fewer seconds",
            err=True,
        )


def _open(path: Path, mode: str) -> IO[str]:
    kind = gzip.open if path.suffix == ".gz" else open
    return cast(IO[str], kind(path, mode, encoding="utf-8"))


def _read(path: Path) -> dict[str, Any]:
    try:
        with _open(path, "rt") as file:
            profile = json.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise click.UsageError(f"--merge {path} cannot be read: {error}") from error
    if not isinstance(profile, dict):
        raise click.UsageError(f"--merge {path} is no trace that torch.profiler exported")
    return profile


def _write(path: Path, trace: dict[str, Any]) -> None:
    """Write the file under another name first: half a trace would open, and mislead."""
    part = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        with _open(part, "wt") as file:
            json.dump(trace, file)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        common.fail(f"{path} cannot be written: {error.strerror}", Exit.USAGE)
