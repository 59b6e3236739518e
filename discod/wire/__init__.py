"""All that the daemon and the client share: messages, codec, fd passing, paths, sizes.

This is the only part of ``discod`` that ``disco_client`` imports. It does no I/O of its own
beyond the two functions of :mod:`discod.wire.fds`, and knows neither torch nor ZeroMQ.
"""

PROTOCOL_VERSION = 2
"""Raised on every incompatible change; differing versions are refused at attach."""

PAGE_BYTES = 4096
"""Alignment of every address, offset and length: the largest logical block of common NVMe."""

MAX_ARENA_BYTES = 1 << 46
"""64 TiB: above any node's memory, and far below where offset arithmetic could overflow."""

LEAST_ARENA_BYTES = 2 << 20
"""A huge page: clients round their arenas up to whole ones."""

BACKING_STEP_BYTES = 64 << 20
"""Clients back their arenas from the start, in whole steps, ahead of use: below the end of a step
in which there is a blob, every page is there. A step costs 20-300 ms once (zeroing, then gathering
into huge pages)."""


def align_up(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
