"""Residency's instructions as requests to the daemon, and the daemon's answers as completions.

A blob that is striped over several scratch directories is one transfer of several requests: it is
done when all are answered. The checksum of each piece, as the daemon took it when it wrote the
piece, is kept here and handed back with the read.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from disco_client.errors import BlobCorrupted, BlobError, ScratchError
from disco_client.extents import Piece
from disco_client.instructions import (
    Cancel,
    Instruction,
    Promote,
    StartRead,
    StartWrite,
    WriteFailure,
)
from disco_client.link import Link
from disco_client.residency import Residency
from discod.wire import messages
from discod.wire.messages import Failed, Failure, Reply


@dataclass(slots=True)
class _Transfer:
    blob: int
    pieces: Sequence[Piece]
    writes: bool
    unanswered: int
    forgotten: bool = False
    seqs: list[int] = field(default_factory=list)
    failures: dict[int, Failed] = field(default_factory=dict)
    checksums: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Trim:
    """Names the trim of a file among the link's enrolments."""

    file: int


class Transfers:
    """All transfers of one session. Not thread-safe: the session's lock covers it."""

    def __init__(self, link: Link, residency: Residency) -> None:
        self._link = link
        self._residency = residency
        self._running: dict[int, _Transfer] = {}
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._checksums: dict[int, tuple[bytes, ...]] = {}
        self._untrimmed = False
        self._trimmed = False

    @property
    def busy_seconds(self) -> float:
        """For how long anything was under way, until its answer was taken in."""
        running = time.monotonic() - self._busy_since if self._running else 0.0
        return self._busy_seconds + running

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Send what the instructions ask for."""
        for instruction in instructions:
            match instruction:
                case StartWrite() | StartRead():
                    self._start(instruction)
                case Promote(blob):
                    self._about(blob, messages.Promote)
                case Cancel(blob):
                    self._about(blob, messages.Cancel)

    def forget(self, blob: int) -> None:
        """The blob is freed: its checksums are of no more use."""
        self._checksums.pop(blob, None)
        if blob in self._running:
            self._running[blob].forgotten = True

    def trim(self) -> None:
        """Tell the daemon, once after use, how little of each scratch file is needed now.

        It holds until the next write, and for daemons to come: one that dies before the file has
        been idle for long enough leaves the trimming to the next.
        """
        if not self._untrimmed:
            return
        self._untrimmed = False
        self._trimmed = True
        for file in range(self._link.files):
            self._link.enroll(_Trim(file), partial(self._make_trim, file), _ignore)

    def _make_trim(self, file: int, seq: int, epoch: int) -> messages.Trim:
        """By what is in use at this moment, which may not be the first one that it is sent at.

        Without live blobs nothing is, though writes of freed ones may have their extents yet: the
        daemon waits for their end, and each write that it gets after this makes this void.
        """
        live = self._residency.live_blobs
        size = self._residency.scratch.high_water_bytes(file) if live else 0
        return messages.Trim(seq, epoch, file, size)

    def _start(self, start: StartWrite | StartRead) -> None:
        transfer = _Transfer(
            start.blob, start.pieces, isinstance(start, StartWrite), len(start.pieces)
        )
        if not self._running:
            self._busy_since = time.monotonic()
        self._running[start.blob] = transfer
        self._untrimmed = True
        if self._trimmed and transfer.writes:
            self._trimmed = False
            for file in range(self._link.files):
                self._link.withdraw(_Trim(file))
        for index, piece in enumerate(start.pieces):
            make: Callable[[int, int], messages.Request] = partial(
                messages.Write,
                file=piece.file,
                offset=piece.offset,
                slot=start.slot + piece.slot_offset,
                length=piece.length,
            )
            if isinstance(start, StartRead):
                make = partial(
                    messages.Read,
                    file=piece.file,
                    offset=piece.offset,
                    slot=start.slot + piece.slot_offset,
                    length=piece.length,
                    checksum=self._checksums[start.blob][index],
                    urgent=start.urgent,
                )
            transfer.seqs.append(self._link.request(make, partial(self._answered, transfer, index)))

    def _about(self, blob: int, verb: type[messages.Promote] | type[messages.Cancel]) -> None:
        transfer = self._running.get(blob)
        for target in transfer.seqs if transfer else ():
            self._link.request(partial(verb, target=target), _ignore)

    def _answered(self, transfer: _Transfer, index: int, reply: Reply) -> None:
        if isinstance(reply, Failed):
            transfer.failures[index] = reply
        else:
            transfer.checksums[index] = reply.checksum
        transfer.unanswered -= 1
        if transfer.unanswered:
            return
        del self._running[transfer.blob]
        if not self._running:
            self._busy_seconds += time.monotonic() - self._busy_since
        if transfer.writes:
            self._write_done(transfer)
        else:
            error = _read_error(transfer)
            cancelled = bool(transfer.failures) and error is None
            self.carry_out(self._residency.read_done(transfer.blob, error, cancelled))

    def _write_done(self, transfer: _Transfer) -> None:
        if not transfer.failures and not transfer.forgotten:
            count = len(transfer.pieces)
            self._checksums[transfer.blob] = tuple(transfer.checksums[i] for i in range(count))
        self.carry_out(self._residency.write_done(transfer.blob, _write_failure(transfer)))


_MILDER = (Failure.OUT_OF_USE, Failure.DISK_FULL, Failure.OVER_BUDGET, Failure.CANCELLED)
"""Failures of a write other than the device's, what decides first; all else counts as that."""


def _write_failure(transfer: _Transfer) -> WriteFailure | None:
    """The one failure that decides what happens next: a bad device before a full or an idle one."""
    if not transfer.failures:
        return None
    kinds = {failed.kind for failed in transfer.failures.values()}
    kind = next((kind for kind in _MILDER if kinds <= set(_MILDER) and kind in kinds), Failure.IO)
    found = {
        index: failed
        for index, failed in transfer.failures.items()
        if failed.kind == kind or (kind is Failure.IO and failed.kind not in _MILDER)
    }
    return WriteFailure(
        kind=kind,
        text="; ".join(dict.fromkeys(failed.text for failed in found.values())),
        files=frozenset(transfer.pieces[index].file for index in found),
    )


def _read_error(transfer: _Transfer) -> BlobError | None:
    """What a load raises for the failures; None when there was none but a cancellation."""
    failures = [f for f in transfer.failures.values() if f.kind != Failure.CANCELLED]
    if not failures:
        return None
    text = "; ".join(dict.fromkeys(failed.text for failed in failures))
    if any(failed.kind == Failure.CORRUPT for failed in failures):
        return BlobCorrupted(
            f"blob {transfer.blob} is not what was written: {text}; the step cannot be completed. "
            "Check the scratch device, or use another --scratch"
        )
    return ScratchError(
        f"blob {transfer.blob} cannot be read back: {text}; the step cannot be completed. "
        "Check the scratch device, or use another --scratch"
    )


def _ignore(reply: Reply) -> None:
    """Nothing waits for this reply."""
