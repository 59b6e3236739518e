"""The status for people: what ``discod status`` prints without ``--json``. Its tables are those of
:mod:`discod.screen`."""

from rich.console import Console
from rich.text import Text

from discod.screen import (
    BAD,
    LEAST_WIDTH,
    WARN,
    client_lines,
    duration,
    scratch_lines,
    short_size,
)
from discod.status import Status
from discod.wire.sizes import format_size

_CHECKSUMS = {
    "off": "off: what the disk gives back is not verified, and a fault of it is a wrong gradient",
    "sampled": "sampled: lost, torn and misdirected writes are found, single flipped bits are not",
    "full": "full: every byte that is read back is verified",
}


def show(status: Status) -> None:
    """Print the status, which is in the form of :func:`discod.status.make_status`."""
    console = Console()
    for line in lines(status, max(console.width, LEAST_WIDTH)):
        console.print(line, soft_wrap=True)


def lines(status: Status, width: int) -> list[Text]:
    """The status; what is said in words may be longer than ``width``."""
    up = duration(status["up_seconds"])
    shown = [Text(f"discod {status['version']}, pid {status['pid']}, up {up}")]
    for name, what in (("ram", "arenas"), ("disk", "scratch")):
        used, limit = (format_size(status[f"{name}{part}_bytes"]) for part in ("_used", ""))
        shown.append(Text(f"{what}: {used} taken of {limit} (--{name})"))
    shown += _writes(status)
    checksum = status["checksum"]
    shown.append(Text(f"checksums: {_CHECKSUMS[checksum]}", WARN if checksum == "off" else ""))
    if status["metrics"]:
        shown.append(Text(f"metrics: http://{status['metrics']}/metrics"))
    shown += [Text(), *scratch_lines(status, width)]
    for directory in status["scratch"]:
        if directory["last_failure"]:
            said = f"{directory['path']}: last failure: {directory['last_failure']}"
            shown.append(Text(said, BAD))
    for gpu in status["gpus"]:
        pid = f"pid {gpu['pid']}" if gpu["pid"] else "no process"
        copied = short_size(gpu["copied_bytes"])
        shown.append(Text(f"{gpu['uuid']}: {pid}, {gpu['clients']} clients, {copied} copied"))
    return [*shown, Text(), *client_lines(status, width)]


def _writes(status: Status) -> list[Text]:
    """What goes to the disks, and what of it is held up."""
    sizes = ("written_bytes", "written_last_day_bytes", "written_bytes_per_day")
    total, last_day, per_day = (format_size(status[name]) for name in sizes)
    shown = [
        Text(f"written: {total} since the start, {last_day} in the last 24 h, {per_day} a day")
    ]
    if status["write_budget_bytes"] is None:
        return shown
    used, limit = (format_size(status[f"write_budget{part}_bytes"]) for part in ("_used", ""))
    span = {3600: "hour", 86400: "day"}[int(status["write_budget_seconds"])]
    text = f"write budget: {used} used of {limit} per {span} (--write-budget)"
    short_seconds = status["write_budget_short_seconds"]
    if short_seconds:
        text += f", SHORT for {short_seconds:.0f} s, {status['write_budget_held']} writes wait"
    shown.append(Text(text, WARN if short_seconds else ""))
    return shown
