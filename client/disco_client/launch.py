"""Starting a daemon for this node when there is none: ``connect(scratch=...)``.

Any number of ranks may try at the same moment. The daemon's own locks let one of them through;
the others' processes end at once, and their clients find the one that runs.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from disco_client.errors import DaemonNotRunning

EXIT_IDLE_SECONDS = 5
"""How long a daemon started here stays after its last client."""

SETTLE_SECONDS = 3.0
"""After a daemon started here has failed: how long another rank's may take to show up."""


RESTART_SECONDS = 1.0
"""Between two starts, so that a daemon that cannot start does not cost a core."""


class Launcher:
    """Starts ``discod`` in the background, detached from this process and its terminal.

    Args:
        scratch: Its scratch directories.
        socket_dir: Its socket directory.
    """

    def __init__(self, scratch: Sequence[Path], socket_dir: Path) -> None:
        # -P: no module of the working directory's takes the place of one of the daemon's.
        self._command = [sys.executable, "-P", "-m", "discod", "--socket-dir", str(socket_dir)]
        for directory in scratch:
            self._command += ["--scratch", str(directory.absolute())]
        self._command += ["--exit-idle", str(EXIT_IDLE_SECONDS)]
        self._pid: int | None = None
        self._log_fd = -1
        self._next_start = 0.0
        self.failure: str | None = None
        """What the last daemon said when it ended with an error."""

    def ensure(self) -> None:
        """Start a daemon unless one that was started here still runs. Does not wait for it."""
        reap()
        now = time.monotonic()
        if self._running() or now < self._next_start:
            return
        self._next_start = now + RESTART_SECONDS
        # An unlinked log: read back when the start fails, and gone with the daemon.
        if self._log_fd >= 0:
            os.close(self._log_fd)
        self._log_fd = os.memfd_create("discod-log", os.MFD_CLOEXEC)
        left_out = _OWN_OPTIONS | _OF_THIS_PROCESS
        environment = {k: v for k, v in os.environ.items() if k not in left_out}
        self._pid = os.posix_spawn(
            sys.executable,
            self._command,
            environment,
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, self._log_fd, 1),
                (os.POSIX_SPAWN_DUP2, self._log_fd, 2),
            ],
        )

    def poll(self) -> None:
        """Notice that the daemon has ended; :attr:`failure` then says why."""
        self._running()

    def close(self) -> None:
        """Let go of a daemon that was started here; it goes on by itself."""
        if self._pid is not None and self._running():
            _left_running.add(self._pid)
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1
        reap()

    def error(self, socket_dir: Path) -> DaemonNotRunning:
        """The error for a start that failed."""
        return DaemonNotRunning(
            f"the daemon that was to listen in {socket_dir} did not start: "
            f"{self.failure or 'it is not ready yet'} (command: {' '.join(self._command)})"
        )

    def _running(self) -> bool:
        if self._pid is None:
            return False
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # reaped by the user's own wait()
            pid, status = self._pid, 0
        if pid == 0:
            return True
        self._pid = None
        code = os.waitstatus_to_exitcode(status)
        if code:
            said = os.pread(self._log_fd, 1 << 16, 0).decode(errors="replace").strip()
            self.failure = f"exit code {code}: {said.splitlines()[-1] if said else 'no message'}"
        return False


_left_running: set[int] = set()
"""Daemons whose launchers are closed, to be reaped once they have ended."""


def reap() -> None:
    """Collect ended daemons, so that no zombie is left until this process ends."""
    for pid in list(_left_running):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            ended = pid
        if ended:
            _left_running.discard(pid)


_OWN_OPTIONS = frozenset({"DISCOD_SCRATCH", "DISCOD_SOCKET_DIR", "DISCOD_EXIT_IDLE"})
"""Given on the command line instead."""
_OF_THIS_PROCESS = frozenset(
    {"CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS"}
)
"""What the daemon, which is for all processes of the node, must not take from this one: devices,
and what a service manager said to this process."""
