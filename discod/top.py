"""The frames of ``discod top``: the status of one moment, made to fit a terminal.

The command, its keys and its waiting for a daemon are in :mod:`discod.commands.top`.
"""

from rich.text import Text

from discod.screen import (
    BAD,
    HEAD,
    LEAST_WIDTH,
    WARN,
    client_lines,
    cut,
    duration,
    scratch_lines,
    short_size,
)
from discod.status import Status

BAR_CHARS = 30
FULL = 0.9
"""Of a budget: worth a look."""


def frame(status: Status, clock: str, width: int, height: int | None = None) -> list[Text]:
    """One frame.

    Args:
        status: In the form of :func:`discod.status.make_status`.
        clock: The time of day, for the corner.
        width, height: Of the terminal; without a height all clients are shown.
    """
    width = max(width, LEAST_WIDTH)
    title = f"discod {status['version']}  pid {status['pid']}  up {duration(status['up_seconds'])}"
    shown = [
        Text(f"{title}{clock.rjust(width - len(title))}", HEAD),
        _bar("arenas", status["ram_used_bytes"], status["ram_bytes"], "(--ram)"),
        _bar("scratch", status["disk_used_bytes"], status["disk_bytes"], "(--disk)"),
        Text(
            f"written  {short_size(status['written_bytes'])} since the start, "
            f"{short_size(status['written_last_day_bytes'])} in the last 24 h, "
            f"{short_size(status['written_bytes_per_day'])} a day"
        ),
    ]
    if status["write_budget_bytes"] is not None:
        span = {3600: "per hour", 86400: "per day"}[int(status["write_budget_seconds"])]
        held = status["write_budget_held"]
        if held:
            span += f", {held} writes wait"
        used = status["write_budget_used_bytes"]
        shown.append(_bar("budget", used, status["write_budget_bytes"], span))
    shown += [Text(), *scratch_lines(status, width)]
    for directory in status["scratch"]:
        if directory["last_failure"]:
            said = f"{directory['path']}: last failure: {directory['last_failure']}"
            shown.append(Text(cut(said, width), BAD))
    for gpu in status["gpus"]:
        copied = short_size(gpu["copied_bytes"])
        said = f"{gpu['uuid']}: pid {gpu['pid'] or '-'}, {gpu['clients']} clients, {copied} copied"
        shown.append(Text(cut(said, width)))
    shown.append(Text())
    left = None if height is None else max(2, height - len(shown))
    shown += client_lines(status, width, left)
    for line in shown:
        line.truncate(width)
    return shown if height is None else shown[:height]


def waiting(reason: str, clock: str, width: int) -> list[Text]:
    """The frame without a daemon."""
    width = max(width, LEAST_WIDTH)
    head = Text(f"discod top{clock.rjust(width - len('discod top'))}", HEAD)
    text = Text(f"{reason}. Waiting for a daemon; q ends.", BAD)
    return [head, Text(), text]


def _bar(name: str, used: int, limit: int, what: str) -> Text:
    part = min(1.0, used / limit) if limit else 1.0
    full = round(part * BAR_CHARS)
    line = Text(f"{name:8} [")
    line.append("#" * full, WARN if part >= FULL else "green")
    line.append(f"{'.' * (BAR_CHARS - full)}] ")
    return line.append(f"{short_size(used):>5} of {short_size(limit):>5} {what}")
