"""The client's connection to the daemon: attach, requests, replies, and coming back after a loss.

A request is kept here until it is answered, because ZeroMQ loses messages silently when a peer
dies; after a re-attach all that is unanswered is sent again under the new daemon's epoch. Every
request is idempotent, so sending one twice does no harm. It is made anew for that: what was true of
the scratch file when it was sent first need not be true any more.

The daemon is lost when its end of the lifeline closes, and also when the I/O connection alone
breaks (:mod:`disco_client.io_connection`).

The link is not thread-safe: :mod:`disco_client.session` serialises all calls but :meth:`wait` and
:meth:`wake`. What is sent, and what answers mean, is decided there.
"""

import contextlib
import dataclasses
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Hashable

from disco_client.errors import DaemonError, DaemonLost, DaemonNotRunning, NoDescriptors, afresh
from disco_client.greeting import HANDSHAKE_SECONDS, Call, Greeting
from disco_client.io_connection import IoConnection
from discod.wire.fds import send_message
from discod.wire.messages import Detach, Ping, Reply, Request

BRIEF_SECONDS = 0.1
"""For an attach message, while the caller can go on without the daemon."""

RETRY_SECONDS = 0.05
"""Between attempts to re-attach."""

MOST_SENT = 16_384
"""Requests sent and not answered; the others wait here. The daemon refuses those above 32,768."""

Answer = Callable[[Reply], None]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Pending:
    make: Callable[[int, int], Request]
    answer: Answer


@dataclasses.dataclass(slots=True)
class _Enrolment:
    make: Callable[[int, int], Request]
    answer: Answer
    seq: int


class Link:
    """One attached connection, which survives the daemon.

    Args:
        greeting: The open greeting to attach through.
        arena_fd, arena_bytes: The arena, handed over now and at every re-attach.
        reconnect_timeout: Seconds that a lost daemon may stay away before :class:`DaemonLost`.
        reply_timeout: Seconds without any answer to a ping before :class:`DaemonLost`.
        restart: Called before each attempt to re-attach, to start a daemon where that is wanted.
    """

    def __init__(
        self,
        greeting: Greeting,
        arena_fd: int,
        arena_bytes: int,
        *,
        reconnect_timeout: float,
        reply_timeout: float,
        restart: Callable[[], None],
    ) -> None:
        self.socket_dir = greeting.path.parent
        self.directories = greeting.welcome.directories
        self.reconnect_timeout = reconnect_timeout
        self.reply_timeout = reply_timeout
        self._arena_fd = arena_fd
        self._arena_bytes = arena_bytes
        self._restart = restart
        self._pending: dict[int, _Pending] = {}
        self._enrolments: dict[Hashable, _Enrolment] = {}
        self._unsent: deque[int] = deque()
        self._unanswered = 0
        self._next_seq = 0
        self._scratch_fds: list[int] = []
        self._lost_since: float | None = None
        self._next_attempt = self._next_brief = 0.0
        self._failure: DaemonError | None = None
        self._last_word = time.monotonic()
        self._asked_at: float | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._open(greeting)
        except BaseException:
            os.close(self._wake_fd)
            raise

    @property
    def files(self) -> int:
        """How many scratch files there are: fewer than directories when some were out of use."""
        return len(self._scratch_fds)

    @property
    def lost(self) -> bool:
        """Whether the daemon is away."""
        return self._lost_since is not None

    def request(self, make: Callable[[int, int], Request], answer: Answer) -> int:
        """Send ``make(seq, epoch)``; ``answer`` gets its reply from :meth:`drain`. Returns seq.

        ``make`` is called again for each daemon that it is sent to.
        """
        seq = self._next_seq
        self._next_seq += 1
        self._pending[seq] = _Pending(make, answer)
        if not self.lost:
            self._unsent.append(seq)
            self._send_some()
        return seq

    def _ping(self) -> None:
        """Ask for any answer, ahead of what waits behind ``MOST_SENT`` others to be sent."""
        seq = self._next_seq
        self._next_seq += 1
        self._pending[seq] = _Pending(Ping, lambda reply: None)
        self._send(seq)

    def enroll(self, name: Hashable, make: Callable[[int, int], Request], answer: Answer) -> bool:
        """As :meth:`request`, to this daemon and to each one after it.

        The ones after it get it in its old place: after what is unanswered and was asked before it,
        before what was asked after it.

        Args:
            name: For :meth:`withdraw`; takes the place of an earlier one of that name.
            make, answer: As for :meth:`request`; ``answer`` gets each daemon's.
        """
        self._enrolments[name] = _Enrolment(make, answer, self.request(make, answer))
        return True

    def withdraw(self, name: Hashable) -> bool:
        """Tell further daemons nothing of it."""
        return self._enrolments.pop(name, None) is not None

    @property
    def stirred(self) -> bool:
        """Whether there may be answers that :meth:`wait` would not tell of; :meth:`drain` looks."""
        return self._lost_since is None and self._io.stirred

    def quiet(self) -> bool:
        """Whether :meth:`drain` and an unblocked :meth:`check` would find nothing to do."""
        return self._lost_since is None and self._io.quiet()

    def drain(self) -> bool:
        """Hand over all replies that are there, without waiting. True when there was any."""
        if self.lost:
            return False
        replies = self._io.received()
        # ZeroMQ reconnects by itself: these may be a new daemon's, which does not know us yet and
        # refuses. The old one's end is seen on the lifeline before that. All is sent again.
        if not replies or self._hung_up():
            return False
        self._last_word = time.monotonic()
        self._asked_at = None
        for reply in replies:
            pending = self._pending.pop(reply.seq, None) if reply.epoch == self._epoch else None
            if pending is not None:
                self._unanswered -= 1
                pending.answer(reply)
        self._send_some()
        return True

    def wait(self, timeout: float) -> None:
        """Until a reply, :meth:`wake` or the daemon's end, or ``timeout`` seconds.

        Touches no ZeroMQ state: the caller drains, under its lock, before and after.
        """
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if not self.lost:
            for fd in (*self._io.fds, self._lifeline.fileno()):
                poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, timeout) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """End another thread's :meth:`wait`."""
        os.eventfd_write(self._wake_fd, 1)

    def check(self, *, blocked: bool) -> None:
        """Notice a daemon that has gone or is back, and re-attach. Never waits for long.

        Args:
            blocked: The caller cannot go on without the daemon; otherwise nothing is raised.

        Raises:
            DaemonLost: Away for ``reconnect_timeout``, or silent for ``reply_timeout``, seconds.
            NoDescriptors: As DaemonLost, for want of fds; the next call may find some.
            DaemonError: It is back but will not take this client: what was on disk is lost.
        """
        now = time.monotonic()
        if self._lost_since is None and self._hung_up():
            _log.warning("the daemon on %s has hung up; attaching again", self.socket_dir)
            self._lost_since = now
            self._close_connection()
        if self._lost_since is not None:
            away = now - self._lost_since
            failure = self._try_again(now, away, blocked=blocked)
            if failure is not None and blocked:
                self._give_up(failure, away)
        elif blocked:
            self._ask_for_a_word(now)

    @property
    def patience(self) -> float:
        """The longest sensible :meth:`wait` before the next :meth:`check`, in seconds."""
        return RETRY_SECONDS if self.lost else 1.0

    def close(self) -> None:
        """Detach for good: the daemon frees everything of this client. Idempotent."""
        if self._wake_fd < 0:
            return
        said = False
        if not self.lost:
            with contextlib.suppress(OSError):  # it has hung up
                send_message(self._lifeline, Detach())
                said = True
            self._close_connection()
        if not said:
            # One that is still there keeps the files until it hears of us, or this process ends.
            with contextlib.suppress(DaemonError, OSError):
                Call(self.socket_dir, BRIEF_SECONDS).give_up(self._scratch_fds)
        for fd in (*self._scratch_fds, self._wake_fd):
            os.close(fd)
        self._scratch_fds = []
        self._wake_fd = -1

    def abandon(self) -> None:
        """After fork, in the child: drop the copies of fds; touch nothing of ZeroMQ.

        A child that held the scratch files would keep their space after the end of its parent.
        """
        self._lifeline.close()
        for fd in self._scratch_fds:
            os.close(fd)
        self._scratch_fds = []

    def _open(self, greeting: Greeting) -> None:
        """Attach (or resume) through ``greeting`` and send all that is unanswered."""
        lifeline, identity, fds = greeting.attach(
            self._arena_fd, self._arena_bytes, self._scratch_fds
        )
        if not self._scratch_fds:
            self._scratch_fds = fds
        try:
            self._io = IoConnection(greeting.io_path, identity)
        except BaseException:
            lifeline.close()
            raise
        self._io.watch(lifeline.fileno())
        self._lifeline = lifeline
        self._epoch = greeting.welcome.epoch
        self._lost_since = None
        self._last_word = time.monotonic()
        self._asked_at = None
        for enrolment in self._enrolments.values():
            self._pending[enrolment.seq] = _Pending(enrolment.make, enrolment.answer)
        self._unanswered = 0
        self._unsent = deque(sorted(self._pending))
        self._send_some()

    def _send_some(self) -> None:
        while self._unsent and self._unanswered < MOST_SENT:
            self._send(self._unsent.popleft())

    def _send(self, seq: int) -> None:
        self._io.send(self._pending[seq].make(seq, self._epoch))
        self._unanswered += 1

    def _hung_up(self) -> bool:
        """Whether the daemon has closed the lifeline, or the I/O connection is not what it was."""
        if self._io.broken:
            return True
        try:
            return not self._lifeline.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _close_connection(self) -> None:
        self._lifeline.close()
        self._io.close()

    def _try_again(self, now: float, away: float, *, blocked: bool) -> DaemonError | None:
        """Try to re-attach, when it is time to; why it did not succeed the last time."""
        if now < (self._next_attempt if blocked else self._next_brief):
            return self._failure
        self._failure = None
        try:
            self._restart()
            timeout = HANDSHAKE_SECONDS if blocked else BRIEF_SECONDS
            self._open(Greeting(self.socket_dir, timeout))
            _log.warning("attached to a daemon on %s again after %.1f s", self.socket_dir, away)
        except DaemonError as error:
            self._failure = afresh(error)
        except OSError as error:
            self._failure = DaemonLost(
                f"this process could not attach to the daemon on {self.socket_dir} again: {error}"
            )
        ended = time.monotonic()
        self._next_attempt = ended + RETRY_SECONDS
        # A daemon that accepts and does not answer must not slow down calls that can do without.
        took = min(ended - now, 2 * BRIEF_SECONDS)  # one of a blocked call may have taken longer
        self._next_brief = ended + max(RETRY_SECONDS, 20 * took)
        return self._failure

    def _give_up(self, failure: DaemonError, away: float) -> None:
        """Raise when a caller that is blocked should not wait any longer."""
        if not isinstance(failure, DaemonNotRunning | DaemonLost | NoDescriptors):
            raise afresh(failure)
        if away > self.reconnect_timeout:
            if isinstance(failure, NoDescriptors):
                self._next_attempt = 0.0  # the caller may have closed some by the next call
                raise afresh(failure)
            raise DaemonLost(
                f"the daemon on {self.socket_dir} went away and was not back within "
                f"{self.reconnect_timeout:g} s (reconnect_timeout): what is on disk cannot be "
                "loaded. Start it again ('discod --scratch DIR') and this process resumes"
            ) from failure

    def _ask_for_a_word(self, now: float) -> None:
        """Ping a daemon that has been silent while a caller was blocked; lose patience in time."""
        if self._asked_at is None:
            if now - self._last_word >= 1.0:
                self._asked_at = now
                self._ping()
        elif now - self._asked_at > self.reply_timeout:
            silent = now - self._asked_at
            self._asked_at = None
            self._last_word = now
            raise DaemonLost(
                f"the daemon on {self.socket_dir} has not answered a ping for {silent:.0f} s "
                "(reply_timeout): it is stopped or the node is overloaded. Nothing is lost; the "
                "next call works once it runs again"
            )
