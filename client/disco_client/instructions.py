"""What residency tells its caller to do, what the caller tells it of failures, and the counters.

An instruction names the blob by its id; completions come back by the same id through
``Residency.write_done`` and ``Residency.read_done``.
"""

from dataclasses import dataclass

from disco_client.extents import Piece
from discod.wire.messages import Failure


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Write the blob's ``size_bytes`` at arena offset ``slot`` to ``pieces``."""

    blob: int
    slot: int
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read ``pieces`` into the arena at ``slot``; ``urgent``: a trainer is blocked on it."""

    blob: int
    slot: int
    size_bytes: int
    pieces: tuple[Piece, ...]
    urgent: bool


@dataclass(frozen=True, slots=True)
class Promote:
    """The blob's read in flight was a prefetch and is now waited for: make it urgent."""

    blob: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the blob's write or read in flight, unless it has begun; it still completes."""

    blob: int


Instruction = StartWrite | StartRead | Promote | Cancel


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """Why a blob's write failed, over all of its pieces.

    Args:
        kind: ``CANCELLED``; ``DISK_FULL``; ``OVER_BUDGET``; ``OUT_OF_USE``; anything else counts
            as ``IO``.
        text: The daemon's words: directory, operation, errno; for people.
        files: The scratch files at fault. Empty: all files for ``DISK_FULL`` (as with the
            daemon's quota), as always for ``OVER_BUDGET``; the files of the blob's own pieces
            otherwise.
    """

    kind: Failure
    text: str = ""
    files: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes are of whole pages, as the slots have them; the rest are numbers of blobs or loads."""

    saved_blobs: int = 0
    """Blobs that were filled."""
    saved_bytes: int = 0
    """Bytes of all blobs that were filled."""
    written_bytes: int = 0
    """Bytes of completed writes."""
    elided_bytes: int = 0
    """Saved bytes of blobs that were freed and never written. A write that was cancelled counts at
    once; one that had begun after all is taken back when it completes, perhaps in the next cycle.
    """
    read_bytes: int = 0
    """Bytes of completed reads."""
    prefetch_hits: int = 0
    """Loads of a blob that had left RAM and was back in time, without waiting."""
    prefetch_misses: int = 0
    """Loads that had to wait for a read, counted once each."""
    device_hits: int = 0
    """Loads that a device served by itself: it still had the tensor, or had it back already."""

    def since(self, earlier: "Counters") -> "Counters":
        """What was counted after ``earlier``."""
        names = Counters.__match_args__
        return Counters(*(getattr(self, name) - getattr(earlier, name) for name in names))
