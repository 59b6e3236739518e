"""A daemon simulated behind the link's interface: it reads and writes when an adversary says so."""

import ctypes
import random
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from disco_client.arena import Arena
from disco_client.errors import DaemonLost
from disco_client.link import Answer
from discod.wire.messages import Cancel, Done, Failed, Failure, Read, Reply, Request, Write
from tests.helpers.simulated_gpu import GARBAGE


@dataclass(eq=False)
class _Io:
    """A write or read that is not answered yet; ``begun``: what was in the arena by then."""

    request: Write | Read
    answer: Answer
    begun: bytes | None = None
    cancelled: bool = False


class SimulatedDaemon:
    """In place of :class:`disco_client.link.Link`. Nothing waits: a wait lets one step be made.

    Args:
        arena: The client's.
        seed: Of all choices.
        mode: As of :class:`tests.helpers.simulated_gpu.Machine`.

    Attributes:
        away: It is killed: nothing goes on, and what had begun begins again when it is back.
        violations: Slots that were changed while they were being written.
    """

    files = 1

    def __init__(self, arena: Arena, seed: int = 0, mode: str = "random") -> None:
        self.patience = 0.01
        self.lost = False
        self.violations: list[str] = []
        self.disk: dict[int, bytes] = {}
        """By offset."""
        self.writes = self.reads = 0
        self._mode = mode
        self._arena = arena
        self._random = random.Random(seed)
        self._io: dict[int, _Io] = {}
        self._replies: list[tuple[Answer, Reply]] = []
        self._next_seq = 0
        self._pressed = False
        self._away = False
        self.when_waiting: Callable[[], None] = lambda: None
        """Called in each wait of a client."""

    @property
    def away(self) -> bool:
        """Whether it is killed."""
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        for io in self._io.values():
            io.begun = None

    # As of Link

    def enroll(self, name: Hashable, make: Callable[[int, int], Request], answer: Answer) -> bool:
        """It is the same daemon when it is back, and forgets nothing."""
        self.request(make, answer)
        return True

    def withdraw(self, name: Hashable) -> bool:
        """See :meth:`enroll`."""
        return True

    def request(self, make: Callable[[int, int], Request], answer: Answer) -> int:
        """Take a request."""
        seq = self._next_seq
        self._next_seq += 1
        request = make(seq, 1)
        if isinstance(request, Write | Read):
            self._io[seq] = _Io(request, answer)
        elif isinstance(request, Cancel):
            if request.target in self._io:
                self._io[request.target].cancelled = True
        else:
            self._replies.append((answer, Done(seq, 1, b"")))
        return seq

    stirred = False
    """A wait makes a step, so no answer is missed."""

    def quiet(self) -> bool:
        """Each look may make steps."""
        return False

    def drain(self) -> bool:
        """Make some steps, and hand over the answers."""
        if self._away:
            return False
        steps = {"early": len(self._io) * 2, "late": 0}.get(self._mode)
        if steps is None:
            steps = self._random.choice((0, 0, 1, 2, 3))
        for _ in range(max(steps, self._pressed)):
            self._step()
        self._pressed = False
        replies, self._replies = self._replies, []
        for answer, reply in replies:
            answer(reply)
        return bool(replies)

    def check(self, *, blocked: bool) -> None:
        """Raise when it is away and somebody cannot go on without it."""
        if self._away and blocked:
            raise DaemonLost("simulated: it is away")

    def wait(self, timeout: float) -> None:
        """Let a step be made."""
        self._pressed = True
        self.when_waiting()
        if threading.active_count() > 1:
            threading.Event().wait(1e-5)

    def wake(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is open."""

    # Steps

    def _step(self) -> None:
        if not self._io:
            return
        seq = self._random.choice(list(self._io))
        io = self._io[seq]
        request = io.request
        address = self._arena.address + request.slot
        reply: Reply = Done(seq, 1, b"checksum")
        if io.begun is None:
            if not io.cancelled:
                io.begun = ctypes.string_at(address, request.length)
                if isinstance(request, Read):
                    ctypes.memset(address, GARBAGE, request.length)
                return
            reply = Failed(seq, 1, Failure.CANCELLED, 0, "cancelled")
        elif isinstance(request, Write):
            self.writes += 1
            if ctypes.string_at(address, request.length) != io.begun:
                self.violations.append(f"the slot at {request.slot} changed while it was written")
            for offset in range(0, request.length, 4096):
                self.disk[request.offset + offset] = io.begun[offset : offset + 4096]
        else:
            self.reads += 1
            data = b"".join(
                self.disk[request.offset + offset] for offset in range(0, request.length, 4096)
            )
            ctypes.memmove(address, data, len(data))
        del self._io[seq]
        self._replies.append((io.answer, reply))
