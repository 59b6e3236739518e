"""Telling the service manager: sd_notify(3) without libsystemd.

Where there is no service manager (``NOTIFY_SOCKET`` is not set), nothing happens. Nothing here
ever raises: a daemon must not fail because the one who watches it cannot be reached.
"""

import contextlib
import os
import socket
import time

from discod.loop import Loop, Timer

STATUS_SECONDS = 5.0
"""At least, between two lines of status that nobody waits for."""


def notify(*states: str) -> None:
    """Send ``states``, such as ``READY=1``, in one message."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):
        address = "\0" + address[1:]
    elif not address.startswith("/"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto("\n".join(states).encode(), address)


def watchdog_seconds() -> float | None:
    """How often the service manager wants to hear of this process (sd_watchdog_enabled(3))."""
    pid = os.environ.get("WATCHDOG_PID", "")
    if pid and pid != str(os.getpid()):
        return None
    try:
        microseconds = int(os.environ.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 else None


class ServiceManager:
    """What the daemon tells its service manager in the course of its life.

    The watchdog is fed from the event loop, so that a loop which is stuck is noticed. Without one
    there is no timer, and an idle daemon does not wake up.

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._text = ""
        self._said_at = 0.0
        self._later: Timer | None = None

    def ready(self) -> None:
        """It listens. From now on the watchdog is fed."""
        notify("READY=1", "STATUS=no clients")
        seconds = watchdog_seconds()
        if seconds is not None:
            self._feed(seconds / 2)

    def clients(self, count: int) -> None:
        """How many are attached; said at once, or soon when it was said a moment ago."""
        self._text = "no clients" if not count else f"{count} client{'s' * (count > 1)}"
        if "NOTIFY_SOCKET" not in os.environ or self._later is not None:
            return
        wait = self._said_at + STATUS_SECONDS - time.monotonic()
        if wait > 0:
            self._later = self._loop.call_later(wait, self._say)
        else:
            self._say()

    def stopping(self) -> None:
        """It serves no new clients any more, and is about to end."""
        notify("STOPPING=1", "STATUS=ending")

    def _say(self) -> None:
        self._later = None
        self._said_at = time.monotonic()
        notify(f"STATUS={self._text}")

    def _feed(self, seconds: float) -> None:
        notify("WATCHDOG=1")
        self._loop.call_later(seconds, lambda: self._feed(seconds))
