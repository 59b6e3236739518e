"""Carries out the planned actions, one after the other, on a world in which steps are under way."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.chaos.plan import Action, Kind
from tests.chaos.world import RECONNECT_SECONDS, World, waited

RESUME_SECONDS = 0.05
"""Clients try to attach again every 50 ms: within that, a resume of each has begun."""
TRIM_SECONDS = 3.0
"""After which a daemon trims files that are idle (``discod.trimming``)."""


class Adversary:
    """Acts on ``world``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._acts: dict[Kind, Callable[[float], None]] = {
            Kind.KILL_DAEMON: self._kill_daemon,
            Kind.KILL_DAEMON_TWICE: self._kill_daemon_twice,
            Kind.RESTART_DAEMON: self._restart_daemon,
            Kind.KILL_RANK: self._kill_rank,
            Kind.KILL_RANK_ATTACHING: self._kill_rank_attaching,
            Kind.CLOSE_RANK: self._close_rank,
            Kind.STOP_DAEMON: self._stop_daemon,
            Kind.STOP_RESUME: self._stop_resume,
            Kind.STOP_RANK: self._stop_rank,
            Kind.FILL: self._fill,
            Kind.FAIL_WRITES: self._fail_writes,
            Kind.FAIL_READS: self._fail_reads,
            Kind.SHORT: self._short,
            Kind.DELAY: self._delay,
            Kind.TRIM: self._trim,
            Kind.AWAY: self._away,
        }

    def act(self, action: Action) -> None:
        """Do it, after its delay."""
        time.sleep(action.delay_ms / 1000)
        self._acts[action.kind](action.size)

    def _kill_daemon(self, size: float) -> None:
        self._world.kill_daemon()
        self._world.start_daemon()

    def _kill_daemon_twice(self, size: float) -> None:
        self._world.kill_daemon()
        self._world.start_daemon(ready=False)
        self._world.wait_until_listening()
        time.sleep(size * RESUME_SECONDS)
        self._kill_daemon(size)

    def _restart_daemon(self, size: float) -> None:
        self._world.the_daemon.terminate()
        code = self._world.the_daemon.wait(10)
        if code:
            raise AssertionError(f"after SIGTERM the daemon ended with {code}")
        self._world.counts.kills["daemon SIGTERM"] += 1
        self._world.start_daemon()

    def _kill_rank(self, size: float) -> None:
        self._world.replace(self._victim(size))

    def _kill_rank_attaching(self, size: float) -> None:
        victim = self._victim(size)
        self._world.replace(victim)
        time.sleep(size * RESUME_SECONDS)
        self._world.replace(victim)

    def _close_rank(self, size: float) -> None:
        number = self._victim(size)
        rank = self._world.victims.ranks[number]
        rank.tell("close")
        waited(lambda: not rank.busy, 1.0)
        self._kill_daemon(size)

    def _stop_daemon(self, size: float) -> None:
        pid = self._world.the_daemon.pid
        self._world.counts.kills["daemon SIGSTOP"] += 1
        with _stopped(pid):
            time.sleep(0.05 + 0.35 * size)

    def _stop_resume(self, size: float) -> None:
        self._world.kill_daemon()
        self._world.start_daemon(ready=False)
        self._world.wait_until_listening()
        time.sleep(size * RESUME_SECONDS)
        self._stop_daemon(size)
        self._world.the_daemon.wait_until_ready()

    def _stop_rank(self, size: float) -> None:
        ranks = self._world.survivors.ranks
        self._world.counts.kills["rank SIGSTOP"] += 1
        with _stopped(ranks[int(size * len(ranks))].pid):
            time.sleep(0.1 + 0.9 * size)

    def _fill(self, size: float) -> None:
        for disk in self._world.disks:
            disk.fill(int(size * 4) << 20)
        try:
            victim = self._victim(size)
            self._world.replace(victim)
            rank = self._world.victims.ranks[victim]
            waited(lambda: not rank.busy, 1.5)
        finally:
            self._world.heal()

    def _fail_writes(self, size: float) -> None:
        self._faults(f"pwritev EIO in={self._directory(size)}", size)

    def _fail_reads(self, size: float) -> None:
        self._faults(f"preadv EIO in={self._directory(size)}", size)

    def _short(self, size: float) -> None:
        self._faults("pwritev short every=2\npreadv short every=2", size)

    def _delay(self, size: float) -> None:
        seconds = 0.002 + 0.02 * size
        self._faults(f"pwritev delay={seconds}\npreadv delay={seconds}", size)

    def _faults(self, rules: str, size: float) -> None:
        self._world.set_faults(rules)
        time.sleep(0.05 + 0.3 * size)
        self._world.set_faults("")

    def _trim(self, size: float) -> None:
        waited(lambda: not any(rank.busy for rank in self._world.all_ranks), TRIM_SECONDS)
        time.sleep(TRIM_SECONDS - 0.1 + 0.2 * size)
        self._kill_daemon(size)

    def _away(self, size: float) -> None:
        self._world.kill_daemon()
        # Ranks that have nothing on disk complete their step without a daemon.
        waited(lambda: not any(rank.busy for rank in self._world.all_ranks), 2 * RECONNECT_SECONDS)
        self._world.start_daemon()

    def _victim(self, size: float) -> int:
        return int(size * len(self._world.victims.ranks))

    def _directory(self, size: float) -> str:
        return str(self._world.disks[int(size * len(self._world.disks))].path)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
