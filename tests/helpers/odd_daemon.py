"""A daemon with something in it replaced: ``odd_daemon.prefix("probe=0.2")`` for ``start_daemon``.

Each oddity is ``NAME`` or ``NAME=VALUE``:

probe: seconds between probes of a directory that is out of use, in place of 30.
broken: the schedule of what runs next raises, whenever something is queued: a bug.
strict: every read, write and reservation must be of whole pages, at whole pages of file and memory,
or fails with EINVAL, as on the strictest device.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from discod import faults, health
from discod.cli import main as discod
from discod.engine import Job
from discod.io import Io
from discod.schedule import Schedule
from discod.wire import PAGE_BYTES

_Transfer = Callable[[int, Sequence[memoryview], int], int]


def prefix(*oddities: str) -> list[str]:
    """What to put before the command of a daemon."""
    return [sys.executable, "-m", "tests.helpers.odd_daemon", *oddities, "--"]


def strict(io: Io) -> Io:
    """``io`` with the check of ``strict``."""

    def checked(call: _Transfer) -> _Transfer:
        def transfer(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            for buffer in buffers:
                address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                _require_pages(address, len(buffer), offset)
            return call(fd, buffers, offset)

        return transfer

    def fallocate(fd: int, offset: int, length: int) -> None:
        _require_pages(offset, length)
        io.fallocate(fd, offset, length)

    return Io(
        open=io.open,
        fallocate=fallocate,
        pwritev=checked(io.pwritev),
        preadv=checked(io.preadv),
        write_back=io.write_back,
    )


def _require_pages(*numbers: int) -> None:
    if any(number % PAGE_BYTES for number in numbers):
        raise OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)}: not in whole pages: {numbers}")


def _broken(schedule: Schedule[Job]) -> None:
    if schedule.ready:
        raise RuntimeError("the schedule is broken")


def main() -> None:
    """Replace what the arguments before ``--`` say, and be the daemon of the command after it."""
    end = sys.argv.index("--")
    for oddity in sys.argv[1:end]:
        name, _, value = oddity.partition("=")
        match name:
            case "probe":
                health.PROBE_SECONDS = float(value)
            case "broken":
                Schedule.pop = _broken  # type: ignore[method-assign,assignment]
            case "strict":
                faults.from_environment = partial(strict, faults.from_environment())
            case _:
                raise SystemExit(f"{oddity!r} is no oddity")
    python, dash_m, module = sys.argv[end + 1 : end + 4]
    assert (python, dash_m, module) == (sys.executable, "-m", "discod")
    discod(sys.argv[end + 4 :], prog_name="discod")


if __name__ == "__main__":
    main()
