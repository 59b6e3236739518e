"""The system calls that touch a scratch disk, so that others can be put in their place.

Tests give their own; :mod:`discod.faults` makes some that fail on demand.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from discod import syscalls


def _open(path: Path | str, flags: int, mode: int) -> int:
    return os.open(path, flags, mode)


@dataclass(frozen=True, slots=True)
class Io:
    """As :mod:`os` and :mod:`discod.syscalls` have them; each raises ``OSError``.

    Attributes:
        open: Path, flags and mode to a new fd.
        fallocate: Reserves fd, offset, length.
        pwritev: Writes to fd from buffers at an offset; returns how many bytes.
        preadv: Reads from fd into buffers at an offset; returns how many bytes.
        write_back: Waits until fd, offset, length are on the device; for buffered files.
    """

    open: Callable[[Path | str, int, int], int] = _open
    fallocate: Callable[[int, int, int], None] = syscalls.fallocate
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    write_back: Callable[[int, int, int], None] = syscalls.write_back
