"""Sizes as people write them: ``8GiB``, ``1.5 GB``, ``4096``."""

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of ``"8GiB"`` or ``"8G"`` (powers of 1024), ``"8GB"`` (of 1000), ``"4096"`` or an int.

    Raises:
        ValueError: The text is no size, or the size is not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{text!r} is no size; write for example 8GiB, 500MB or 4096")
        size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size <= 0:
        raise ValueError(f"{text!r} is no size: it must be above 0")
    return size


def format_size(size_bytes: float) -> str:
    """``8.0 GiB``, ``512 B``: three or so significant digits, for people."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
