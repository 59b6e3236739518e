"""What a client is told of a write or read that failed, and what the log and the directory are."""

import errno
import logging

from discod.engine import Cancelled
from discod.logs import RateLimited
from discod.scratch_file import ScratchFile, ScratchFull, Unopened
from discod.transfer import Corrupt, OutOfUse, PastTheEnd
from discod.wire.messages import Failed, Failure, Read, Write
from discod.wire.sizes import format_size

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_failures = RateLimited(logging.getLogger(__name__))


def failed(request: Write | Read, file: ScratchFile, error: BaseException, who: object) -> Failed:
    """The answer to ``request`` of ``who``, which failed with ``error``.

    A failure of the device is noted with the file's directory.
    """
    seq, epoch = request.seq, request.epoch
    what = (
        f"{type(request).__name__.lower()} of {format_size(request.length)} at "
        f"{request.offset} in scratch {file.directory}"
    )
    code = (error.errno or 0) if isinstance(error, OSError | ScratchFull) else 0
    match error:
        case Cancelled():
            return Failed(seq, epoch, Failure.CANCELLED, 0, "cancelled")
        case OutOfUse():
            # The log has it since the directory went out of use.
            text = f"{what} refused: it is out of use: {file.health.last_failure}"
            return Failed(seq, epoch, Failure.OUT_OF_USE, 0, text)
        case ScratchFull():
            kind, text = Failure.DISK_FULL, str(error)
        case Corrupt():
            kind = Failure.CORRUPT
            text = f"{what}: not what was written there (by its checksum); check the device"
        case PastTheEnd():
            # The device has done what it was asked for, and the kernel has nothing to say of it.
            kind = Failure.IO
            text = (
                f"{what} goes past the end of its file: {error.strerror}. What was asked for was "
                "never written, or the file was cut off from outside; its bytes are lost"
            )
        case OSError():
            kind = Failure.DISK_FULL if code in _NO_ROOM else Failure.IO
            reason = f"{what} failed: {error.strerror} (errno {code})"
            if not isinstance(error, Unopened):
                file.health.note(error, reason)
            text = f"{reason}; see the kernel's log"
        case _:
            kind, text = Failure.IO, f"{what} failed: {error!r}"
    _failures.warning("%s: %s", who, text)
    return Failed(seq, epoch, kind, code, text)
