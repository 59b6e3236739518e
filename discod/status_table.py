"""The status for people: what ``discod status`` prints without ``--json``."""

from typing import Any

from rich.console import Console
from rich.table import Table

from discod.wire.sizes import format_size

_SIZES = ("arena", "disk", "written", "read")


def show(status: dict[str, Any]) -> None:
    """Print the status, which is in the form of :func:`discod.status.make_status`."""
    console = Console()
    console.print(f"discod {status['version']}, pid {status['pid']}", highlight=False)
    for name, what in (("ram", "arenas"), ("disk", "scratch")):
        used, limit = (format_size(status[f"{name}{part}_bytes"]) for part in ("_used", ""))
        console.print(f"{what}: {used} taken of {limit} (--{name})", highlight=False)
    console.print(f"checksums: {status['checksum']}", highlight=False)
    scratch = Table("scratch", "I/O", "used", "free")
    for directory in status["scratch"]:
        scratch.add_row(
            directory["path"],
            "O_DIRECT" if directory["direct"] else "buffered",
            format_size(directory["used_bytes"]),
            format_size(directory["free_bytes"]),
        )
    console.print(scratch)
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
            *(format_size(client[f"{what}_bytes"]) for what in _SIZES),
            str(client["in_flight"]),
        )
    console.print(clients)
