"""The status as lines of text, in 80 columns or more: for ``discod status`` and ``discod top``.

Lines are made here and not by a table of rich's, which wraps or cuts what does not fit: whatever
the numbers are, each stays whole and in its column. Sizes are short, as ``ls -h`` has them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.text import Text

from discod.status import Status

LEAST_WIDTH = 80

WARN, BAD, HEAD, DIM = "yellow", "bold red", "bold", "dim"

MUCH_WAITING = 0.1
"""Of the time: from here on it is worth a larger arena or a faster disk."""


class Column(NamedTuple):
    """One column of numbers, or of text when ``left``."""

    title: str
    width: int
    cell: Callable[[Status], str]
    style: Callable[[Status], str] = lambda row: ""
    left: bool = False


def short_size(size_bytes: float) -> str:
    """``0``, ``512``, ``1.5M``, ``12.3G``, ``123G``: five characters at most, powers of 1024."""
    value = float(size_bytes)
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"


def duration(seconds: float) -> str:
    """``0:00:09``, ``3d 02:05:11``."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (
        f"{days}d {hours:02}:{minutes:02}:{whole:02}"
        if days
        else f"{hours}:{minutes:02}:{whole:02}"
    )


def cut(text: str, width: int) -> str:
    """The begin of ``text``, when it is too long."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def cut_path(path: str, width: int) -> str:
    """The end of ``path``, which tells more than its begin, when it is too long."""
    return path if len(path) <= width else f"...{path[3 - width :]}"


def scratch_lines(status: Status, width: int) -> list[Text]:
    """The scratch directories: one line each, below the titles."""
    rest = sum(column.width + 1 for column in _SCRATCH)
    room = max(width, LEAST_WIDTH) - rest
    path = Column("scratch", room, lambda row: cut_path(row["path"], room), left=True)
    return _table([path, *_SCRATCH], status["scratch"])


def client_lines(status: Status, width: int, most: int | None = None) -> list[Text]:
    """The clients by rank: two lines each, below the titles.

    Args:
        status: Whose clients.
        width: Of the lines.
        most: Lines; what has no room is counted in the last one. None: all.
    """
    clients = sorted(status["clients"], key=_order)
    if not clients:
        return [Text("no clients")]
    shown = clients
    if most is not None and 1 + 2 * len(clients) + bool(status["clients_left_out"]) > most:
        shown = clients[: max(0, (most - 2) // 2)]
    head, *rows = _table(_CLIENTS, shown)
    lines = [head]
    for client, row in zip(shown, rows, strict=True):
        lines += [row, _about(client, width)]
    hidden = len(clients) - len(shown) + status["clients_left_out"]
    if hidden:
        lines.append(Text(f"{hidden} more; 'discod status --json' has them", DIM))
    return lines


def _order(client: Status) -> tuple[bool, int, int]:
    """By rank, those without one last."""
    return client["rank"] < 0, client["rank"], client["pid"]


def _about(client: Status, width: int) -> Text:
    text = (
        f"        up {duration(client['attached_seconds'])}, {client['cycles']} cycles, "
        f"{client['in_flight']} in flight  {client['command']}"
    )
    return Text(cut(text.rstrip(), width), DIM)


def _table(columns: Sequence[Column], rows: Sequence[Status]) -> list[Text]:
    lines = [Text(" ".join(_align(column, column.title) for column in columns), HEAD)]
    for row in rows:
        line = Text()
        for column in columns:
            line.append(_align(column, column.cell(row)), column.style(row))
            line.append(" ")
        line.rstrip()
        lines.append(line)
    lines[0].rstrip()
    return lines


def _align(column: Column, text: str) -> str:
    return text.ljust(column.width) if column.left else text.rjust(column.width)


def _size(title: str, width: int, key: str) -> Column:
    return Column(title, width, lambda row: short_size(row[key]))


def _share(title: str, what: str) -> Column:
    return Column(
        title,
        5,
        lambda row: f"{row['waits'][what]['share']:.0%}",
        lambda row: WARN if row["waits"][what]["share"] >= MUCH_WAITING else "",
    )


_SCRATCH = (
    Column("device", 9, lambda row: cut(row["device_name"] or row["device"], 9), left=True),
    Column(
        "I/O",
        8,
        lambda row: "O_DIRECT" if row["direct"] else "buffered",
        lambda row: "" if row["direct"] else WARN,
        left=True,
    ),
    _size("used", 5, "used_bytes"),
    _size("free", 5, "free_bytes"),
    _size("write/s", 7, "written_bytes_per_second"),
    _size("read/s", 6, "read_bytes_per_second"),
    Column(
        "state",
        10,
        lambda row: "in use" if row["in_use"] else "OUT OF USE",
        lambda row: "" if row["in_use"] else BAD,
        left=True,
    ),
)

_CLIENTS = (
    Column("pid", 7, lambda row: str(row["pid"])),
    Column("uid", 5, lambda row: str(row["uid"])),
    Column("rank", 4, lambda row: str(row["rank"]) if row["rank"] >= 0 else "-"),
    _size("arena", 5, "arena_bytes"),
    _size("disk", 5, "disk_bytes"),
    _size("write/s", 7, "written_bytes_per_second"),
    _size("read/s", 6, "read_bytes_per_second"),
    _share("room%", "room"),
    _share("read%", "read"),
    _size("written", 7, "written_bytes"),
    _size("elided", 6, "elided_bytes"),
)
