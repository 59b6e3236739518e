"""A process that attaches, saves, loads and closes under a shower of interrupts.

``shower.py SOCKET_DIR SEED ROUNDS``: signals come from a timer, and only the guarded part of a
round sees them. Then it says whether it is as it was before the first: fds, threads.
"""

import os
import random
import signal
import sys
import threading
import time
from types import FrameType

import torch

import disco_client
from disco_client.errors import DiscodError

TENSORS = 6
LATEST_SECONDS = 0.03
APART_SECONDS = 0.0007


def use(socket_dir: str) -> None:
    """What a trainer does, in some milliseconds."""
    disco_client.connect(socket_dir, arena="2MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 17,), float(i))) for i in range(TENSORS)]
    for number, handle in reversed(list(enumerate(handles))):
        assert bool((manager.load_tensor(handle) == number).all())
    disco_client.close()


def held() -> tuple[int, int]:
    """Fds, and threads of any kind."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(wanted: tuple[int, int]) -> tuple[int, int]:
    """As :func:`held`, once it is no more than ``wanted``, or some time later."""
    ends = time.monotonic() + 5
    while held()[1] > wanted[1] or (held()[0] > wanted[0] > 0):
        if time.monotonic() > ends:
            break
        threading.Event().wait(0.01)
    return held()


class Shower:
    """Interrupts that come inside of :func:`use` alone, from a random moment on."""

    def __init__(self, chance: random.Random) -> None:
        self.seen = 0
        self._chance = chance
        for number in (signal.SIGALRM, signal.SIGINT):  # the latter: one that Python has lost
            signal.signal(number, self._interrupt)

    def begin(self) -> None:
        """One, or many in a row."""
        apart = APART_SECONDS * self._chance.choice((0, 0, 1, 3))
        signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, LATEST_SECONDS), apart)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is use.__code__:
                self.seen += 1
                raise KeyboardInterrupt
            frame = frame.f_back


def main() -> None:
    """See the module's text."""
    socket_dir, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.unraisablehook = lambda _: None  # interrupts in finalizers
    for _ in range(3):  # what is made once, by torch too
        use(socket_dir)
    before = settled((0, 1))
    shower = Shower(random.Random(seed))
    for _ in range(rounds):
        try:
            shower.begin()
            use(socket_dir)
        except (KeyboardInterrupt, DiscodError):
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        disco_client.close()  # whatever is open is closed by it
    print(shower.seen, *before, *settled(before))
    use(socket_dir)


if __name__ == "__main__":
    main()
