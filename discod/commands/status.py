"""``discod status``: the daemon's state, once, for people or as JSON."""

import json
from pathlib import Path

import click

from discod.commands import common


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
@common.socket_dir
def command(as_json: bool, socket_dir: Path | None) -> None:
    """Show the daemon's scratch directories and clients."""
    status = common.ask_status(socket_dir)
    if as_json:
        click.echo(json.dumps(status))
    else:
        from discod.status_table import show

        show(status)
