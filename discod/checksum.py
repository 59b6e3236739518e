"""Checksums of blobs: taken when a blob is written, verified when it is read.

A token is one byte for its kind and eight of xxh3-64. Verification follows the token, not the
daemon's own mode, so that a blob outlives a daemon restarted with another ``--checksum``.
"""

from enum import StrEnum

import xxhash

from discod.wire import PAGE_BYTES

SAMPLE_STEP_BYTES = 1 << 20
"""One page in each of these: 0.4 % of the bytes, and no chunk of a blob goes unseen."""

_TOKEN_BYTES = 9


class Mode(StrEnum):
    """What ``--checksum`` can be."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


_KINDS = {Mode.SAMPLED: b"\x01", Mode.FULL: b"\x02"}
_MODES = {kind: mode for mode, kind in _KINDS.items()}


def take(mode: Mode, data: memoryview) -> bytes:
    """The token of ``data``, which is whole pages; empty when ``mode`` is off."""
    if mode is Mode.OFF:
        return b""
    digest = xxhash.xxh3_64()
    if mode is Mode.FULL:
        digest.update(data)
    else:
        # The last page is always among them: most torn writes lose the end.
        last = len(data) - PAGE_BYTES
        for start in range(0, last, SAMPLE_STEP_BYTES):
            digest.update(data[start : start + PAGE_BYTES])
        digest.update(data[last:])
    return _KINDS[mode] + digest.digest()


def valid(token: bytes) -> bool:
    """Whether ``token`` is one that :func:`take` can have made."""
    return not token or (len(token) == _TOKEN_BYTES and token[:1] in _MODES)


def matches(token: bytes, data: memoryview) -> bool:
    """Whether ``data`` is what ``token`` was taken of; an empty token matches anything."""
    return not token or take(_MODES[token[:1]], data) == token
