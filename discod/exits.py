"""The daemon's exit codes, and the error that carries one out of the start-up."""

from enum import IntEnum


class Exit(IntEnum):
    """Why ``discod`` exited. The values are part of the interface: append only."""

    OK = 0
    CRASHED = 1
    """A bug: an exception that nothing expected."""
    USAGE = 2
    """A wrong option or value (click's own code for it)."""
    NO_DAEMON = 3
    """``discod status`` and other commands that ask it: no daemon listens on the socket."""
    CHECKS_FAILED = 4
    """``discod doctor``: a check failed; with ``--strict``, or was a warning."""
    SCRATCH_MISSING = 10
    SCRATCH_NOT_A_DIRECTORY = 11
    SCRATCH_READ_ONLY = 12
    """A read-only file system, or a directory without the permission to write."""
    SCRATCH_LOCKED = 13
    """Another daemon serves this scratch directory."""
    SCRATCH_UNUSABLE = 14
    """Any other failure of the scratch directory; the text has its errno."""
    SOCKET_DIR_UNUSABLE = 20
    SOCKET_LOCKED = 21
    """Another daemon serves this socket directory."""
    SOCKET_PATH_TOO_LONG = 22
    FAULTS_UNUSABLE = 23
    """The file that ``DISCOD_FAULTS`` names, for tests, cannot be read or has a bad rule."""
    ACTIVATION_UNUSABLE = 24
    """The sockets that the service manager has passed are not the daemon's two."""
    METRICS_UNUSABLE = 25
    """The address of ``--metrics`` cannot be listened on."""
    FORCED = 30
    """A second signal came before the drain that the first one began had ended."""


class StartupError(Exception):
    """The daemon cannot start.

    Args:
        code: The exit code.
        text: Fact, consequence and remedy, for the person who started it.
    """

    def __init__(self, code: Exit, text: str) -> None:
        super().__init__(text)
        self.code = code
