"""The status for people: what ``discod status`` prints without ``--json``."""

from typing import Any

from rich.console import Console
from rich.table import Table

from discod.wire.sizes import format_size

_SIZES = ("arena", "disk", "written", "read")

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
            *(format_size(client[f"{what}_bytes"]) for what in _SIZES),
            str(client["in_flight"]),
        )
    console.print(clients)
