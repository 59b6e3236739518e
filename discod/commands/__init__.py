"""The subcommands of ``discod``: one module each, with the name of the command, loaded when used.

A new one is a module here with a ``command``, and its line in :data:`SUMMARIES`. What several of
them need, and how they fail, is in :mod:`discod.commands.common`.
"""

import importlib

import click

SUMMARIES = {
    "status": "Show the daemon's scratch directories and clients.",
    "top": "Show the same live.",
    "doctor": "Check whether this machine, and this user, can use discod.",
    "trace": "Write the daemon's last I/O calls, and its clients' waits, as a trace.",
}
"""What ``discod --help`` says of each; so that it need not load them all."""


class Commands(click.Group):
    """A group that imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the help text."""
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; None: there is none of that name."""
        if cmd_name not in SUMMARIES:
            return None
        command = importlib.import_module(f"discod.commands.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"discod.commands.{cmd_name}.command is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))
