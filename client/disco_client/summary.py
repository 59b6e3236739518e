"""The line at the end of a run that says what was moved.

Off until a patch is enabled, or ``DISCOD_SUMMARY=1``; ``DISCOD_SUMMARY=0`` silences it.
"""

import os
import sys

from disco_client.job import local_rank, local_ranks
from disco_client.stats import Stats
from discod.wire.sizes import format_size

RATE_SECONDS = 60.0
"""A day's bytes are not worth extrapolating from less."""

_shown = False


def show_at_end() -> None:
    """Print the line when this process detaches; the first rank of a node speaks for all."""
    global _shown
    _shown = True


def finish(stats: Stats) -> None:
    """Print the line for ``stats``, if it is wanted and there is something to say."""
    wanted = os.environ.get("DISCOD_SUMMARY", "1" if _shown else "0") not in ("", "0")
    if wanted and stats.saved_blobs and local_rank() == 0:
        print(line(stats), file=sys.stderr, flush=True)


def line(stats: Stats) -> str:
    """``stats`` in one line."""
    ranks = local_ranks() or 1
    who = "discod" if ranks == 1 else f"discod (rank 0 of {ranks} here)"
    waited = stats.save_wait_seconds + stats.load_wait_seconds
    long = stats.written_bytes and stats.attached_seconds >= RATE_SECONDS
    rate = f" ({format_size(stats.written_bytes_per_day)} a day)" if long else ""
    return (
        f"{who}: {stats.saved_blobs} tensors, {format_size(stats.saved_bytes)} saved; "
        f"{format_size(stats.written_bytes)} written to disk{rate}, the rest stayed in RAM "
        f"({format_size(stats.arena_bytes)} arena); waited {waited:.1f} s"
    )
