"""One GPU: the clients that have rings on it, and its process, which comes back when it dies.

The daemon never calls CUDA. What is asked of a GPU waits here, in the order of each client, until
its process has answered. When the process dies, or is killed because it does not answer, a new one
opens all rings again and gets all unanswered requests again: every one of them may be done twice.

Restarts of a process
---------------------
1. kernel: the process ends; its mappings of arenas and rings are gone with it.
2. here: requests to close a ring, and clients that are leaving, have what they want.
3. here: a new process is started, if there is anything to do for it. It is given each client
   again, then its rings, then its unanswered requests, with those sent before in front.
4. here: after ``MOST_DEATHS`` deaths in a row, with no copy in between, everything that is asked of
   the GPU fails instead, and its rings are closed.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from uuid import UUID

from discod.gpu_messages import (
    AddClient,
    AddRing,
    Copy,
    Ended,
    Probe,
    Ready,
    RemoveClient,
    RemoveRing,
    RingWork,
    ToDaemon,
)
from discod.gpu_process import GpuProcess
from discod.gpu_seat import Outcome, Seat, Work
from discod.loop import Loop

MOST_DEATHS = 3
"""A process that dies of one request dies of it again; other requests must not wait for ever."""

WINDOW = 32
"""Unanswered requests of one client in the process at a time: enough to keep it busy, few enough
that those of all clients fit into the connection, and that no client's wait behind another's."""

TICK_SECONDS = 1.0
STUCK_TICKS = 10
"""Ticks without an answer to a probe. The calls of a process that is well take up to a second, when
they pin memory; a driver that is resetting a GPU, or has lost it, may never return from one."""
START_TICKS = 60
"""Until it is ready: the driver starts within some seconds even on nodes with many GPUs."""

LEAVE_SECONDS = 2.0
LEAVE_BYTES_PER_SECOND = 16 << 30
"""In these a process that is well has dropped a client: its copies end in milliseconds, and
unpinning is linear in the arena. A killed process has to unpin as well, so less would not help."""

IDLE_SECONDS = 30.0
"""Without clients; then the GPU memory that its context takes is worth more than a fast start."""

_log = logging.getLogger(__name__)


class GpuHost:
    """One GPU: the clients that have rings on it, and its process.

    Args:
        loop: The event loop.
        uuid: Its UUID.

    Attributes:
        copied_bytes: Of all copies that succeeded.
    """

    def __init__(self, loop: Loop, uuid: bytes) -> None:
        self.name = f"GPU-{UUID(bytes=uuid)}"
        self.copied_bytes = 0
        self._loop = loop
        self._uuid = uuid
        self._seats: dict[int, Seat] = {}
        self._tickets = itertools.count(1)
        self._by_ticket: dict[int, Seat] = {}
        self._process: GpuProcess | None = None
        self._ready = False
        self._refusal = ""
        self._deaths = 0
        self._removals: dict[int, Seat] = {}
        self._unsent: deque[RemoveClient | Probe] = deque()
        self._probe = 0
        self._ticks = 0
        self._idle_ticks = 0

    @property
    def pid(self) -> int:
        """Its process's, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def clients(self) -> int:
        return len(self._seats)

    @property
    def useless(self) -> bool:
        """Whether there is nothing to remember of it."""
        return not self._seats and self._process is None

    def ticket(self) -> int:
        """A number for a request."""
        return next(self._tickets)

    def add(self, seat: Seat) -> None:
        """A client comes."""
        self._seats[seat.number] = seat

    def submit(self, seat: Seat, message: RingWork, outcome: Outcome) -> None:
        """Queue a request of a client."""
        seat.queue.append(Work(message, outcome))
        self._pump()

    def remove(self, seat: Seat, left: Callable[[], None]) -> None:
        """A client leaves."""
        for ticket in seat.sent:
            del self._by_ticket[ticket]
        for work in seat.take_all():
            work.fail("the ring is closed")
        seat.left = left
        if self._process is None or not seat.added:
            self._gone(seat)
            return
        request = RemoveClient(self.ticket(), seat.number)
        self._removals[request.ticket] = seat
        self._unsent.append(request)
        seconds = LEAVE_SECONDS + seat.arena_bytes / LEAVE_BYTES_PER_SECOND
        seat.late = self._loop.call_later(
            seconds, partial(self._kill, "it keeps a client's memory")
        )
        self._pump()

    def kill(self) -> None:
        """End its process without a word, at the daemon's end."""
        if self._process is not None:
            self._process.kill()

    def _pump(self) -> None:
        """Give the process what it can take."""
        process = self._process
        if process is None:
            if any(seat.queue for seat in self._seats.values()):
                self._start()
            return
        if not self._ready:
            return
        while self._unsent and process.send(self._unsent[0]):
            self._unsent.popleft()
        for seat in self._seats.values():
            if not self._pump_seat(process, seat):
                return

    def _pump_seat(self, process: GpuProcess, seat: Seat) -> bool:
        """Send what the seat's window allows; False when the connection is full."""
        while seat.queue and len(seat.sent) < WINDOW:
            if not seat.added:
                request = AddClient(seat.number, seat.arena_bytes)
                if not process.send(request, [seat.arena_fd]):
                    return False
                seat.added = True
            work = seat.queue[0]
            if not process.send(work.message):
                return False
            seat.queue.popleft()
            seat.sent[work.message.ticket] = work
            self._by_ticket[work.message.ticket] = seat
        return True

    def _start(self) -> None:
        self._ready = False
        self._probe = self._ticks = self._idle_ticks = 0
        try:
            self._process = GpuProcess(self._loop, self._uuid, self._received, self._died)
        except OSError as error:
            self._fail_all(f"the daemon cannot start a process for {self.name}: {error}")
            return
        self._loop.call_later(TICK_SECONDS, partial(self._tick, self._process))

    def _received(self, message: ToDaemon) -> None:
        match message:
            case Ready(refusal=""):
                self._ready = True
                _log.info("%s is served by pid %d", self.name, self.pid)
            case Ready():
                self._refusal = message.refusal
                self.kill()
            case Ended():
                self._request_ended(message)
        self._pump()

    def _request_ended(self, message: Ended) -> None:
        if message.ticket == self._probe:
            self._probe = self._ticks = 0
        elif message.ticket in self._removals:
            self._gone(self._removals.pop(message.ticket))
        elif message.ticket in self._by_ticket:
            seat = self._by_ticket.pop(message.ticket)
            work = seat.sent.pop(message.ticket)
            self._account(seat, work.message, message.error)
            work.outcome(message.error)

    def _account(self, seat: Seat, message: RingWork, error: str) -> None:
        match message:
            case AddRing() if not error:
                seat.rings[message.ring] = message
            case RemoveRing():
                seat.rings.pop(message.ring, None)
            case Copy() if not error:
                self._deaths = 0
                self.copied_bytes += message.length

    def _tick(self, process: GpuProcess) -> None:
        """Once in ``TICK_SECONDS`` while this process lives.

        Ticks are counted, not seconds: a daemon that was stopped blames nobody for the time.
        """
        if process is not self._process:
            return
        self._loop.call_later(TICK_SECONDS, partial(self._tick, process))
        self._ticks += 1
        self._idle_ticks = 0 if self._seats else self._idle_ticks + 1
        if not self._ready or self._probe:
            limit = STUCK_TICKS if self._ready else START_TICKS
            if self._ticks > limit:
                self._kill(f"it has not answered for {limit * TICK_SECONDS:.3g} s")
        elif self._idle_ticks * TICK_SECONDS >= IDLE_SECONDS:
            process.kill()
        else:
            probe = Probe(self.ticket())
            self._unsent.append(probe)
            self._probe, self._ticks = probe.ticket, 0
        self._pump()

    def _kill(self, reason: str) -> None:
        if self._process is not None:
            _log.warning("the process of %s (pid %d) is killed: %s", self.name, self.pid, reason)
            self._process.kill()

    def _died(self, how: str) -> None:
        """Steps 2 to 4 of the restart."""
        pid, self._process = self.pid, None
        removals, self._removals = list(self._removals.values()), {}
        self._unsent.clear()
        self._by_ticket.clear()
        for seat in removals:
            self._gone(seat)
        if self._refusal:
            refusal, self._refusal = self._refusal, ""
            self._fail_all(refusal)
            return
        if not self._seats:
            return
        self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            _log.error(
                "the process of %s (pid %d) has ended (%s), the %dth in a row without a copy: "
                "clients do without it; see the kernel's log for Xid errors",
                self.name,
                pid,
                how,
                self._deaths,
            )
            self._deaths = 0
            self._fail_all(f"its process died {MOST_DEATHS} times in a row ({how})")
            return
        count = sum(len(seat.sent) for seat in self._seats.values())
        _log.warning(
            "the process of %s (pid %d) has ended (%s): %d requests go to a new one",
            self.name,
            pid,
            how,
            count,
        )
        for seat in list(self._seats.values()):
            self._prepare(seat)
        self._pump()

    def _prepare(self, seat: Seat) -> None:
        """Have the new process given the seat's rings, then what is unanswered."""
        seat.added = False
        works = [work for work in seat.take_all() if not work.again]
        closed = [work for work in works if isinstance(work.message, RemoveRing)]
        for work in closed:
            seat.rings.pop(work.message.ring, None)
        for ring in seat.rings.values():
            reopened = partial(self._reopened, seat, ring.ring)
            seat.queue.append(Work(ring, reopened, again=True))
        seat.queue.extend(work for work in works if work not in closed)
        for work in closed:
            work.outcome("")

    def _reopened(self, seat: Seat, ring: int, error: str) -> None:
        if error:
            _log.warning("%s: a ring cannot be opened again: %s", self.name, error)
            seat.rings.pop(ring, None)

    def _fail_all(self, error: str) -> None:
        for seat in list(self._seats.values()):
            seat.added = False
            seat.rings.clear()
            seat.lost = error
            for work in seat.take_all():
                work.fail(error)

    def _gone(self, seat: Seat) -> None:
        """Nothing of the client is mapped any more."""
        if seat.late is not None:
            seat.late.cancel()
        self._seats.pop(seat.number, None)
        left, seat.left = seat.left, None
        if left is not None:
            left()
