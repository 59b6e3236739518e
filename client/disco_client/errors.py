"""Every error that discod raises in a trainer: one base, a category each, leaves.

The text of each gives the fact, the consequence and the remedy. Nothing here knows torch.
"""

from typing import TypeVar

_E = TypeVar("_E", bound=Exception)


class DiscodError(Exception):
    """Base of all errors of discod."""


def afresh(error: _E) -> _E:
    """The same error as another object, to be kept, or raised where the first one is kept.

    A raised error has the frames that it went through, and by them what those and their callers
    had in hand: a training step's graph, with the very blobs that the keeper waits to be rid of.
    """
    return type(error)(*error.args)


# The daemon


class DaemonError(DiscodError):
    """The daemon cannot be reached or will not serve this process."""


class DaemonNotRunning(DaemonError):
    """No daemon listens on the socket, and this process was not asked to start one."""


class DaemonLost(DaemonError):
    """The daemon went away, or stopped answering, and was not back within the time allowed."""


class AttachRefused(DaemonError):
    """The daemon refused this client: the arena is over its budget, it is shutting down, ..."""


class SocketForbidden(DaemonError, PermissionError):
    """The socket belongs to another user, or its mode keeps this process out."""


class NoDescriptors(DaemonError):
    """This process may not open as many file descriptors as an attachment takes."""


class VersionMismatch(DaemonError):
    """The daemon speaks another version of the protocol."""


# Room


class RoomError(DiscodError):
    """There is no room for a blob. Blobs that were saved before are unaffected."""


class ScratchFull(RoomError):
    """The arena is full, and the disk, the quota or the write budget takes nothing from it."""


class ArenaFull(RoomError):
    """All of the arena is held by loaded tensors that are still alive, or being copied."""


class BlobTooLarge(RoomError):
    """One blob is larger than the whole arena."""


# Data


class BlobError(DiscodError):
    """One blob cannot be had. Other blobs are unaffected."""


class ScratchError(BlobError):
    """The scratch device failed to read or write the blob."""


class BlobCorrupted(BlobError):
    """What was read from the scratch is not what was written."""


class BlobModified(BlobError):
    """The blob's only copy is not what was saved.

    A tensor loaded earlier was changed in place, or the saved tensor before its copy off the GPU
    had landed.
    """


class HandleReleased(BlobError, KeyError):
    """The handle is unknown here: released, cleaned up, or of another process."""

    __str__ = Exception.__str__


# Use


class UsageError(DiscodError, RuntimeError):
    """A call that makes no sense in the present state, such as attaching twice."""


class UnsupportedTensor(DiscodError, TypeError):
    """The tensor's type or layout cannot be kept as bytes (sparse, meta, a subclass)."""


class UnsupportedCall(DiscodError, RuntimeError):
    """The form that was called cannot do this exactly; the text names the one that can."""


class UnsupportedKeyword(UnsupportedCall, TypeError):
    """A keyword argument was given to a form that would lose its gradient."""


class UnsupportedOutput(UnsupportedCall, TypeError):
    """The function returned a container through which the form would lose gradients."""
