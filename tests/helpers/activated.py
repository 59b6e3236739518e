"""Runs a command with sockets passed to it, as a service manager does (sd_listen_fds(3)).

``python activated.py FD,FD... COMMAND...``
"""

import os
import sys

FIRST_FD = 3


def main() -> None:
    """Put the fds where they belong, and become the command."""
    fds = [int(text) for text in sys.argv[1].split(",") if text]
    # Out of each other's way first.
    fds = [os.dup(os.dup(os.dup(fd))) for fd in fds]
    for number, fd in enumerate(fds):
        os.dup2(fd, FIRST_FD + number)
    os.environ |= {"LISTEN_FDS": str(len(fds)), "LISTEN_PID": str(os.getpid())}
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
