"""The status for people: what ``discod status`` prints without ``--json``."""

from typing import Any

from rich.console import Console
from rich.table import Table

from discod.wire.sizes import format_size

_SIZES = {
    "arena": "arena_bytes",
    "disk": "disk_bytes",
    "written": "written_bytes",
    "a day": "written_bytes_per_day",
    "read": "read_bytes",
}

_CHECKSUMS = {
    "off": "off: what the disk gives back is not verified, and a fault of it is a wrong gradient",
    "sampled": "sampled: lost, torn and misdirected writes are found, single flipped bits are not",
    "full": "full: every byte that is read back is verified",
}


def show(status: dict[str, Any]) -> None:
    """Print the status, which is in the form of :func:`discod.status.make_status`."""
    console = Console()
    console.print(f"discod {status['version']}, pid {status['pid']}", highlight=False)
    for name, what in (("ram", "arenas"), ("disk", "scratch")):
        used, limit = (format_size(status[f"{name}{part}_bytes"]) for part in ("_used", ""))
        console.print(f"{what}: {used} taken of {limit} (--{name})", highlight=False)
    console.print(_writes(status), highlight=False)
    console.print(f"checksums: {_CHECKSUMS[status['checksum']]}", highlight=False)
    scratch = Table("scratch", "I/O", "used", "free", "state")
    for directory in status["scratch"]:
        scratch.add_row(
            directory["path"],
            "O_DIRECT" if directory["direct"] else "buffered",
            format_size(directory["used_bytes"]),
            format_size(directory["free_bytes"]),
            "in use" if directory["in_use"] else "OUT OF USE",
        )
    console.print(scratch)
    for directory in status["scratch"]:
        if directory["last_failure"]:
            said = f"{directory['path']}: last failure: {directory['last_failure']}"
            console.print(said, highlight=False, markup=False)
    if status["gpus"]:
        gpus = Table("GPU", "pid", "clients", "copied")
        for gpu in status["gpus"]:
            pid = str(gpu["pid"]) if gpu["pid"] else "-"
            gpus.add_row(gpu["uuid"], pid, str(gpu["clients"]), format_size(gpu["copied_bytes"]))
        console.print(gpus)
    if not status["clients"]:
        console.print("no clients")
        return
    clients = Table("pid", "uid", "rank", *_SIZES, "in flight")
    for client in status["clients"]:
        clients.add_row(
            str(client["pid"]),
            str(client["uid"]),
            str(client["rank"]) if client["rank"] >= 0 else "-",
            *(format_size(client[name]) for name in _SIZES.values()),
            str(client["in_flight"]),
        )
    console.print(clients)


def _writes(status: dict[str, Any]) -> str:
    """What goes to the disks, and what of it is held up."""
    sizes = ("written_bytes", "written_last_day_bytes", "written_bytes_per_day")
    total, last_day, per_day = (format_size(status[name]) for name in sizes)
    text = f"written: {total} since the start, {last_day} in the last 24 h, {per_day} a day"
    if status["write_budget_bytes"] is None:
        return text
    used, limit = (format_size(status[f"write_budget{part}_bytes"]) for part in ("_used", ""))
    span = {3600: "hour", 86400: "day"}[int(status["write_budget_seconds"])]
    text += f"\nwrite budget: {used} used of {limit} per {span} (--write-budget)"
    if status["write_budget_short_seconds"]:
        text += (
            f", SHORT for {status['write_budget_short_seconds']:.0f} s, "
            f"{status['write_budget_held']} writes wait"
        )
    return text
