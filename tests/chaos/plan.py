"""What the adversary does, drawn from a seed: the same actions in the same order every time.

What happens at the moment of each is the machine's doing: a replay repeats the actions and their
delays, not the scheduler.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MOST_DELAY_MS = 200
"""From the beginning of the step, or from the action before: a step takes 300 ms on a quiet core,
and half as much again for writes and reads."""


class Kind(StrEnum):
    """The actions. The daemon runs again, and nothing is stopped, full or failing, after each."""

    KILL_DAEMON = "kill-daemon"
    """SIGKILL; a new one is started."""
    KILL_DAEMON_TWICE = "kill-daemon-twice"
    """The new one too, as soon as it listens: while clients resume."""
    RESTART_DAEMON = "restart-daemon"
    """SIGTERM; when it has ended, a new one is started."""
    KILL_RANK = "kill-rank"
    """SIGKILL of one of the second job, whose reclaim is timed; a new one takes its place."""
    KILL_RANK_ATTACHING = "kill-rank-attaching"
    """The new one too, while it attaches or trains its first step."""
    CLOSE_RANK = "close-rank"
    """One of the second job detaches after the step; the daemon is killed about then."""
    STOP_DAEMON = "stop-daemon"
    """SIGSTOP, and SIGCONT some tenths of a second later."""
    STOP_RESUME = "stop-resume"
    """SIGKILL of the daemon; the new one is stopped for a time while clients resume."""
    STOP_RANK = "stop-rank"
    """SIGSTOP of a surviving rank, for up to a second, while its answers queue up."""
    FILL = "fill"
    """The disks are full, while a rank of the second job begins."""
    FAIL_WRITES = "fail-writes"
    """EIO at every write to one directory, for a time."""
    FAIL_READS = "fail-reads"
    """EIO at every read of one directory, for a time."""
    SHORT = "short"
    """Every second read and write does half."""
    DELAY = "delay"
    """Every read and write takes some milliseconds more."""
    TRIM = "trim"
    """Nobody trains until the daemon trims its files; it is killed about then."""
    AWAY = "away"
    """SIGKILL of the daemon; a new one only when ranks have given up waiting."""


WEIGHTS = {
    Kind.KILL_DAEMON: 10,
    Kind.KILL_DAEMON_TWICE: 5,
    Kind.RESTART_DAEMON: 4,
    Kind.KILL_RANK: 10,
    Kind.KILL_RANK_ATTACHING: 4,
    Kind.CLOSE_RANK: 3,
    Kind.STOP_DAEMON: 3,
    Kind.STOP_RESUME: 3,
    Kind.STOP_RANK: 3,
    Kind.FILL: 3,
    Kind.FAIL_WRITES: 3,
    Kind.FAIL_READS: 3,
    Kind.SHORT: 3,
    Kind.DELAY: 3,
    Kind.TRIM: 1,
    Kind.AWAY: 1,
}

ERRORS = {
    Kind.FILL: {"ScratchFull"},
    Kind.FAIL_WRITES: {"ScratchError", "ScratchFull"},
    Kind.FAIL_READS: {"ScratchError"},
    Kind.AWAY: {"DaemonLost"},
}
"""What a step may raise, in whose round this is; it is made again afterwards. Nothing else may."""

HARMLESS_TO_A_JOB = frozenset(Kind) - set(ERRORS)
"""After which no step raises. A step of a process group cannot be made again by one rank alone."""

SLOW = frozenset({Kind.TRIM, Kind.AWAY})
"""Some seconds each; left out of short runs."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    Attributes:
        delay_ms: After the step has begun or the action before has ended.
        size: From 0 to 1: which rank or directory, and how long, where there is a choice.
    """

    kind: Kind
    delay_ms: int
    size: float

    def __str__(self) -> str:
        return f"{self.kind} +{self.delay_ms}ms {self.size:.2f}"


def draw(seed: int, number: int, kinds: Sequence[Kind]) -> list[Action]:
    """The actions of a round, of these kinds: one to three."""
    source = random.Random(f"{seed}/{number}")
    count = source.choices((1, 2, 3), (5, 3, 2))[0]
    weights = [WEIGHTS[kind] for kind in kinds]
    return [
        Action(source.choices(kinds, weights)[0], source.randint(0, MOST_DELAY_MS), source.random())
        for _ in range(count)
    ]
