"""``discod doctor``: is everything there that the daemon and its clients need, and what to do."""

import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from discod import __version__
from discod.commands import common
from discod.exits import Exit
from discod.wire.paths import default_socket_dir

if TYPE_CHECKING:
    from discod.checkup.finding import Finding
    from discod.checkup.run import Section

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_MOST_COLUMNS = 100
"""Longer lines are hard to read."""


class _Directory(click.Path):
    """A path that is not looked at: with a dead server behind it that would never end."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        if not os.fspath(value):
            self.fail("an empty name is no directory", param, ctx)
        return Path(value)


@click.command()
@click.option(
    "--scratch",
    type=_Directory(),
    multiple=True,
    envvar="DISCOD_SCRATCH",
    help="Scratch directory to check; may be given several times. DISCOD_SCRATCH separates "
    "several by ':'.",
)
@common.socket_dir
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.option("--strict", is_flag=True, help="Have warnings count as failures in the exit code.")
def command(
    scratch: tuple[Path, ...], socket_dir: Path | None, as_json: bool, strict: bool
) -> None:
    """Check whether this machine, and this user, can use discod; changes nothing.

    Run it as the user, and in the container, that runs the daemon or the training.
    """
    from discod.checkup.run import examine

    sections = examine(scratch, socket_dir or default_socket_dir())
    findings = [finding for section in sections for finding in section.findings]
    counts = Counter(str(finding.level) for finding in findings)
    if as_json:
        click.echo(json.dumps(_as_object(sections, counts)))
    else:
        _show(sections, counts)
    bad = counts["fail"] + (counts["warn"] if strict else 0)
    sys.exit(Exit.CHECKS_FAILED if bad else Exit.OK)


def _as_object(sections: Sequence["Section"], counts: Counter[str]) -> dict[str, object]:
    return {
        "version": __version__,
        "uid": os.geteuid(),
        "counts": {level: counts[level] for level in _COLOURS},
        "findings": [
            {
                "section": section.title,
                "subject": finding.subject,
                "check": finding.check,
                "level": str(finding.level),
                "found": finding.found,
                "remedy": finding.remedy,
            }
            for section in sections
            for finding in section.findings
        ],
    }


def _show(sections: Sequence["Section"], counts: Counter[str]) -> None:
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    click.echo(f"discod {__version__}, as uid {os.geteuid()}")
    for section in sections:
        subject = None
        for finding in section.findings:
            if finding.subject != subject:
                subject = finding.subject
                click.secho(f"\n{section.title} {subject}".rstrip(), bold=True)
            _show_finding(finding, columns)
    click.echo(
        f"\n{counts['ok']} ok, {counts['warn']} {'warning' if counts['warn'] == 1 else 'warnings'},"
        f" {counts['fail']} failed"
    )


def _show_finding(finding: "Finding", columns: int) -> None:
    level = str(finding.level)
    text = f"{finding.check}: {finding.found}"
    lines = textwrap.wrap(text, columns - 8, break_on_hyphens=False, break_long_words=False)
    if finding.remedy:
        lines += textwrap.wrap(
            f"-> {finding.remedy}",
            columns - 8,
            subsequent_indent="   ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    click.echo(f"  {click.style(f'{level:5}', fg=_COLOURS[level])} {lines[0]}")
    for line in lines[1:]:
        click.echo(f"{'':8}{line}")
