"""Checksums of blobs: taken when a blob is written, verified when it is read.

A token is one byte for its kind and eight of xxh3-64; the kind of a sampled one is the logarithm of
its step. Verification follows the token, not the daemon's own options, so that a blob outlives a
daemon restarted with another ``--checksum`` or ``--chunk``.

*What sampling sees.* A page is looked at in each step, the first one, and the last page. A step is
no longer than a chunk (:func:`sample_step_bytes`), so whatever is as long as a chunk has such a
page in it, and a chunk at the end has the last one. A write that was lost, torn or misdirected by
at least a chunk is therefore seen, unless what is there instead has the same bytes in those pages.
"""

from enum import StrEnum

import xxhash

from discod.wire import PAGE_BYTES

SAMPLE_STEP_BYTES = 1 << 20
"""One page in each of these at least: 0.4 % of the bytes."""

_TOKEN_BYTES = 9


class Mode(StrEnum):
    """What ``--checksum`` can be."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


_FULL = 1
_SAMPLED = {exponent: 1 << exponent for exponent in range(PAGE_BYTES.bit_length() - 1, 21)}
"""The step of each kind that is sampled."""


def sample_step_bytes(chunk_bytes: int) -> int:
    """The step for blobs that are written in chunks of so many bytes."""
    return min(SAMPLE_STEP_BYTES, 1 << (chunk_bytes.bit_length() - 1))


def take(mode: Mode, data: memoryview, step_bytes: int = SAMPLE_STEP_BYTES) -> bytes:
    """The token of ``data``, which is whole pages; empty when ``mode`` is off.

    Args:
        mode: What to look at.
        data: The blob, or the piece of one that lies in one file.
        step_bytes: From :func:`sample_step_bytes`; for ``sampled``.
    """
    if mode is Mode.OFF:
        return b""
    digest = xxhash.xxh3_64()
    if mode is Mode.FULL:
        kind = _FULL
        digest.update(data)
    else:
        kind = step_bytes.bit_length() - 1
        # The last page is always among them: most torn writes lose the end.
        last = len(data) - PAGE_BYTES
        for start in range(0, last, step_bytes):
            digest.update(data[start : start + PAGE_BYTES])
        digest.update(data[last:])
    return bytes([kind]) + digest.digest()


def valid(token: bytes) -> bool:
    """Whether ``token`` is one that :func:`take` can have made."""
    if not token:
        return True
    return len(token) == _TOKEN_BYTES and (token[0] == _FULL or token[0] in _SAMPLED)


def matches(token: bytes, data: memoryview) -> bool:
    """Whether ``data`` is what ``token`` was taken of; an empty token matches anything."""
    if not token:
        return True
    if token[0] == _FULL:
        return take(Mode.FULL, data) == token
    return take(Mode.SAMPLED, data, _SAMPLED[token[0]]) == token
