"""What the environment says: sizes, directories, and names that were meant to say something."""

import difflib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from discod.wire.paths import default_socket_dir
from discod.wire.sizes import parse_size

_log = logging.getLogger(__name__)

CLIENT = {
    "DISCOD_SOCKET_DIR",
    "DISCOD_SCRATCH",
    "DISCOD_ARENA",
    "DISCOD_MIN_BYTES",
    "DISCOD_TRANSPORT",
    "DISCOD_KEEP_ON_DEVICE",
    "DISCOD_STAGING",
    "DISCOD_CUDA_LIBRARY",
    "DISCOD_SUMMARY",
}
DAEMON = {
    "DISCOD_RAM",
    "DISCOD_DISK",
    "DISCOD_THREADS",
    "DISCOD_CHUNK",
    "DISCOD_CHECKSUM",
    "DISCOD_LOG_LEVEL",
    "DISCOD_ALLOW_GROUP",
    "DISCOD_EXIT_IDLE",
    "DISCOD_METRICS",
    "DISCOD_WRITE_BUDGET",
}
"""Read by a daemon that is started here, which inherits this environment."""
_TESTS = {
    "DISCOD_FAULTS",
    "DISCOD_MODEL_RUNS",
    "DISCOD_TEST_LONG",
    "DISCOD_TEST_REQUIRE_ALL",
    "DISCOD_TEST_ROUNDS",
    "DISCOD_TEST_SEED",
}

_warned: set[str] = set()


def warn_of_unknown_names() -> None:
    """One warning for each ``DISCOD_`` variable that nothing reads: it is misspelt, or too new."""
    known = CLIENT | DAEMON | _TESTS
    for name in sorted(os.environ):
        if name.startswith("DISCOD_") and name not in known and name not in _warned:
            _warned.add(name)
            meant = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {meant[0]}?" if meant else ""
            _log.warning("%s is set, and nothing reads it%s", name, hint)


def size(name: str, given: int | str | None) -> int | None:
    """The size ``name`` that was given, else the one in the environment, else None.

    Raises:
        ValueError: It is malformed; the text names the argument or the variable.
    """
    if given is not None:
        return _parse(name, given)
    variable = f"DISCOD_{name}".upper()
    return _parse(variable, os.environ[variable]) if os.environ.get(variable) else None


def count(name: str, given: int | None) -> int | None:
    """The number ``name`` that was given, 0 or more, else the one in the environment, else None.

    Raises:
        ValueError: It is malformed; the text names the argument or the variable.
    """
    if given is not None:
        if type(given) is not int or given < 0:
            raise ValueError(f"{name}: {given!r} is no whole number, 0 or more")
        return given
    variable = f"DISCOD_{name}".upper()
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{variable}: {text!r} is no whole number, 0 or more")
    return int(text) if text else None


def choice(name: str, given: str | None, choices: Sequence[str]) -> str:
    """The one of ``choices`` that was given, else the environment's, else the first.

    Raises:
        ValueError: It is none of them; the text names the argument or the variable.
    """
    where, value = name, given
    if given is None:
        where = f"DISCOD_{name}".upper()
        value = os.environ.get(where, "").strip() or choices[0]
    if value not in choices:
        raise ValueError(f"{where}: {value!r} is none of {', '.join(choices)}")
    return str(value)


def socket_dir() -> Path:
    """Where the daemon's sockets are."""
    return Path(os.environ.get("DISCOD_SOCKET_DIR") or default_socket_dir())


def scratch_dirs() -> list[Path]:
    """The directories of a daemon that may be started here."""
    return [Path(part) for part in os.environ.get("DISCOD_SCRATCH", "").split(":") if part]


def _parse(name: str, text: int | str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
