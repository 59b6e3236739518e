"""The protocol alone, as a machine small enough to be explored completely.

One client with one slot in its arena, two blobs, and one extent of scratch for each; one daemon at
a time, which may be killed and started again; the I/O connection, which may break alone. A request
that is under way is one tuple; what is in the slot and in the extents is the number of the blob
whose bytes are there. Each event is a step of its own, and every order of them is a path.

``rules`` are what the real code keeps; without any one of them a bad state is found.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

GARBAGE = -1
EMPTY = 0

# Blobs: NEW → DIRTY → WRITING → CLEAN → DISK → READING → CLEAN; a freed one is GONE, or LEAVING
# while a request of it is unanswered.
NEW, DIRTY, WRITING, CLEAN = "new", "dirty", "writing", "clean"
DISK, READING, LEAVING, GONE = "disk", "reading", "leaving", "gone"

Request = tuple[str, int]
"""Kind, ``w`` or ``r``, and blob: its slot and extent follow from that."""

ALL_RULES = frozenset(
    {
        "a new daemon starts when the old one's I/O has ended",  # the lock of the directories
        "a client comes back when its old tenant's I/O has ended",
        "who hangs up and lives keeps its data",
        "a broken I/O connection is noticed",
        "what is unanswered is sent again",
        "a slot is free when nothing of it is unanswered",
        "only the identity in force is served",
    }
)


class State(NamedTuple):
    """All of it."""

    blobs: tuple[str, str] = (NEW, NEW)
    slot: int = EMPTY
    owner: int = -1
    """The blob that has the slot."""
    extents: tuple[int, int] = (EMPTY, EMPTY)
    pending: frozenset[Request] = frozenset()
    up: bool = True
    attached: bool = True
    """The client believes so; its tenant is the one in force."""
    broken: bool = False
    """The I/O connection was another one before."""
    sent: frozenset[Request] = frozenset()
    late: frozenset[Request] = frozenset()
    """Sent under an identity that is not in force any more."""
    queued: frozenset[Request] = frozenset()
    running: frozenset[Request] = frozenset()
    ghosts: frozenset[Request] = frozenset()
    """Running for a tenant that the daemon is about to free."""
    orphans: frozenset[Request] = frozenset()
    """Running for a daemon that was killed."""
    answers: frozenset[tuple[Request, bool]] = frozenset()
    """Request, and whether it was done rather than cancelled."""
    faults: int = 0


class Bad(Exception):
    """Something that must never be."""


class Protocol:
    """The events.

    Args:
        rules: Those that are kept.
        most_faults: Deaths and broken connections on one path.
    """

    def __init__(self, rules: frozenset[str] = ALL_RULES, most_faults: int = 3) -> None:
        self._rules = rules
        self._most_faults = most_faults

    def has(self, words: str) -> bool:
        """Whether the one rule that these words are part of is kept."""
        return any(words in rule for rule in self._rules)

    def events(self, s: State) -> Iterator[tuple[str, State]]:
        """All that can happen next, and what comes of it."""
        for blob in (0, 1):
            yield from self._client(s, blob)
        yield from self._daemon(s)
        yield from self._connection(s)
        if s.faults < self._most_faults:
            yield from self._faults(s)

    def final(self, s: State) -> bool:
        """Whether all is over and nothing is left."""
        return (
            s.blobs == (GONE, GONE)
            and s.owner == -1
            and not (s.pending or s.sent or s.queued or s.running or s.ghosts or s.orphans)
            and s.up
        )

    # The client

    def _client(self, s: State, b: int) -> Iterator[tuple[str, State]]:
        state = s.blobs[b]
        if state == NEW and s.owner == -1:
            yield "save", _blob(s, b, DIRTY)._replace(owner=b, slot=b + 1)
        if state == DIRTY:
            yield "write", self._request(_blob(s, b, WRITING), ("w", b))
        if state == CLEAN:
            if s.slot != b + 1:
                raise Bad(f"blob {b} would be loaded with other bytes")
            yield "evict", _blob(s, b, DISK)._replace(owner=-1)
        if state == DISK and s.owner == -1:
            yield "load", self._request(_blob(s, b, READING)._replace(owner=b), ("r", b))
        if state in (DIRTY, CLEAN, DISK):
            yield "free", self._gone(s, b)
        if state in (WRITING, READING):
            kind = ("w" if state == WRITING else "r", b)
            yield "free", _blob(s, b, LEAVING)
            if not self.has("a slot is free"):
                yield "free at once", self._gone(s, b)
            if kind in s.queued:  # the cancellation has arrived before its begin
                cancelled = s.answers | {(kind, False)}
                yield "cancel", s._replace(queued=s.queued - {kind}, answers=cancelled)

    def _request(self, s: State, request: Request) -> State:
        s = s._replace(pending=s.pending | {request})
        return s._replace(sent=s.sent | {request}) if s.attached else s

    def _gone(self, s: State, b: int) -> State:
        return _blob(s, b, GONE)._replace(owner=-1 if s.owner == b else s.owner)

    def _answered(self, s: State, request: Request, done: bool) -> State:
        kind, b = request
        s = s._replace(pending=s.pending - {request})
        if s.blobs[b] == LEAVING:
            return self._gone(s, b)
        if s.blobs[b] == GONE:
            return s
        if kind == "w":
            return _blob(s, b, CLEAN if done else DIRTY)
        return _blob(s, b, CLEAN) if done else _blob(s, b, DISK)._replace(owner=-1)

    # The daemon

    def _daemon(self, s: State) -> Iterator[tuple[str, State]]:
        for request in s.running:
            ended = self._effect(s, request)
            answers = ended.answers | {(request, True)}
            yield "end", ended._replace(running=s.running - {request}, answers=answers)
        for request in s.ghosts:
            yield "old I/O ends", self._effect(s, request)._replace(ghosts=s.ghosts - {request})
        for request in s.orphans:
            ended = self._effect(s, request)
            yield "orphan ends", ended._replace(orphans=s.orphans - {request})
            yield "orphan ends undone", s._replace(orphans=s.orphans - {request})
        for request in s.queued:
            begun = s._replace(queued=s.queued - {request}, running=s.running | {request})
            yield "begin", begun._replace(slot=GARBAGE) if request[0] == "r" else begun
        if not s.up and not (s.orphans and self.has("the old one's I/O")):
            yield "start", s._replace(up=True)

    def _effect(self, s: State, request: Request) -> State:
        kind, b = request
        if s.owner != b:
            raise Bad(f"I/O of blob {b} on a slot that is not its any more")
        if kind == "w":
            if s.slot != b + 1:
                raise Bad(f"blob {b} is written with other bytes")
            return s._replace(extents=_with(s.extents, b, s.slot))
        return s._replace(slot=s.extents[b])

    # What is between them

    def _connection(self, s: State) -> Iterator[tuple[str, State]]:
        if s.up:
            for request in s.sent:
                yield "arrive", s._replace(sent=s.sent - {request}, queued=s.queued | {request})
            for request in s.late:
                if not self.has("only the identity") and request not in s.queued | s.running:
                    late = s._replace(late=s.late - {request}, queued=s.queued | {request})
                    yield "arrive late", late
                yield "refuse", s._replace(late=s.late - {request})
        noticed = s.broken and self.has("is noticed")
        for request, done in s.answers:
            if s.attached and not noticed:
                rest = s._replace(answers=s.answers - {(request, done)})
                if request in s.pending:
                    rest = self._answered(rest, request, done)
                yield "answer", rest
        if s.attached and noticed:
            yield "notice", self._detached(s)
        if not s.attached and s.up:
            if s.ghosts and self.has("its old tenant's I/O"):
                return
            again = s._replace(attached=True, broken=False, answers=frozenset())
            if self.has("sent again"):
                again = again._replace(sent=s.pending)
            yield "attach", again
            if s.faults < self._most_faults:
                # The answer comes too late: the daemon has let in a client that has hung up.
                late = s._replace(faults=s.faults + 1)
                yield "attach in vain", self._detached(late)

    def _detached(self, s: State) -> State:
        """The lifeline is closed by the client, or by the daemon's end."""
        if s.up and not self.has("keeps its data"):
            s = s._replace(extents=(EMPTY, EMPTY))
        return s._replace(
            attached=False,
            broken=False,
            late=s.late | s.sent,
            sent=frozenset(),
            answers=frozenset(),
            queued=frozenset(),
            running=frozenset(),
            ghosts=s.ghosts | s.running if s.up else frozenset(),
            orphans=s.orphans if s.up else s.orphans | s.running | s.ghosts,
        )

    # Faults

    def _faults(self, s: State) -> Iterator[tuple[str, State]]:
        more = s._replace(faults=s.faults + 1)
        if s.up:
            yield "kill", self._detached(more._replace(up=False))
        if s.attached and s.up:
            for kept in {frozenset(), s.answers}:
                yield "break", more._replace(broken=True, sent=frozenset(), answers=kept)
        if s.up and not s.ghosts and s.pending:
            yield "hang up", self._detached(more)


def explore(protocol: Protocol, start: State | None = None) -> dict[State, list[State]]:
    """Every state that can be reached, and those after it.

    Raises:
        Bad: One is bad; the text has the events that lead to it.
    """
    first = State() if start is None else start
    after: dict[State, list[State]] = {first: []}
    came: dict[State, tuple[str, State | None]] = {first: ("", None)}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        try:
            for event, following in protocol.events(state):
                after[state].append(following)
                if following not in after:
                    after[following] = []
                    came[following] = event, state
                    queue.append(following)
        except Bad as bad:
            path: list[str] = []
            step: State | None = state
            while step is not None:
                event, step = came[step]
                path.append(event)
            raise Bad(f"{bad}, after {', '.join(reversed(path[:-1]))}") from None
    return after


def stuck(after: dict[State, list[State]], protocol: Protocol) -> set[State]:
    """States from which no end can be reached."""
    before: dict[State, list[State]] = {state: [] for state in after}
    for state, following in after.items():
        for one in following:
            before[one].append(state)
    queue = deque(state for state in after if protocol.final(state))
    good = set(queue)
    while queue:
        for state in before[queue.popleft()]:
            if state not in good:
                good.add(state)
                queue.append(state)
    return set(after) - good


def _blob(s: State, b: int, state: str) -> State:
    return s._replace(blobs=(state, s.blobs[1]) if b == 0 else (s.blobs[0], state))


def _with(extents: tuple[int, int], b: int, value: int) -> tuple[int, int]:
    return (value, extents[1]) if b == 0 else (extents[0], value)
