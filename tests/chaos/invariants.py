"""What must hold after every round, when all ranks have completed their step.

1. *Exact*: loss and every gradient of each rank are equal, to the bit, to the plain run's.
2. *Nothing kept*: no rank has a live blob between steps.
3. *Accounted*: nothing is in flight; the daemon knows the living ranks and no other; its disk and
   memory budgets are the sums over them, and the nameless files occupy what is accounted.
4. *Nothing left*: fds of each kind, mapped arenas and threads of the daemon are those of a fresh
   one with as many clients, and its nameless files are those that its clients hold; those of a
   rank are as after the first step of the first in its place.
   No name in the scratch directories, and none but the two sockets in theirs; no mapping of
   /dev/shm.
5. *No fault of its own*: no traceback in the daemon's log.
6. *Flat*: over the run, the own memory of daemons and ranks does not grow.

At the end, without ranks, all accounts are 0 and the disks have as much free as at the beginning.
"""

import os
from collections import Counter
from typing import Any

from discod.status import NoStatus
from tests.chaos.processes import NAMELESS, Holdings, holdings, nameless_files
from tests.chaos.world import World, waited

QUIET_SECONDS = 20.0
"""What a process is about to close, it closes in milliseconds; the machine may be busy."""

WARM_UP_ROUNDS = 10
"""Allocators and caches fill first."""
GROWTH_BYTES = 16 << 20
"""By a straight line through the samples, over the whole run: what garbage of Python and the
allocator's arenas make it swing by in runs that leak nothing. A page for each round of a long run
is more."""


class Broken(Exception):
    """An invariant does not hold."""


class Invariants:
    """Checks a world after each round.

    Args:
        world: With all ranks attached and nothing under way.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._log_read = 0
        self._of_a_rank: dict[tuple[str, int], Holdings] = {}
        self._samples: dict[str, list[tuple[int, int]]] = {}

    def learn(self) -> None:
        """Note what a daemon holds for a client, and what a rank holds; after the first step."""
        clients = len(self._world.all_ranks)
        difference: Counter[str] = Counter()

        def even() -> bool:
            """Whether no connection, such as one that asked for the status, is about to close."""
            nonlocal difference
            difference = holdings(self._world.the_daemon.pid).fds - self._world.empty.fds
            return not any(count % clients for count in difference.values())

        if not waited(lambda: self._accounts() == "" and even(), QUIET_SECONDS):
            raise Broken(f"the daemon holds {difference} for {clients} clients")
        self._for_a_client = Counter({kind: n // clients for kind, n in difference.items()})
        for job in (self._world.survivors, self._world.victims):
            for number, rank in enumerate(job.ranks):
                self._of_a_rank[job.name, number] = holdings(rank.pid)

    def check(self, number: int) -> None:
        """Raise :class:`Broken` unless all holds; ``number`` is the round's."""
        world = self._world
        for probe in (self._accounts, self._daemon_leaks, self._rank_leaks, self._names):
            if not waited(lambda probe=probe: probe() == "", QUIET_SECONDS):
                raise Broken(probe())
        self._read_log()
        for rank in world.survivors.ranks:
            self._sample(rank.name, number, rank.pid)
        self._sample("daemon", number, world.the_daemon.pid)

    def check_flat(self) -> dict[str, float]:
        """As :func:`growth`, of each process's own memory."""
        return {
            name: growth(name, used)
            for name, samples in self._samples.items()
            if len(used := [s for s in samples if s[0] > WARM_UP_ROUNDS]) >= WARM_UP_ROUNDS
        }

    def check_empty(self) -> int:
        """After the end of all ranks: bytes that were not given back, which must be 0."""

        def left() -> int:
            status = self._status()
            disks = zip(self._world.empty_bytes, self._world.disks, strict=True)
            lost = sum(max(0, before - disk.free_bytes()) for before, disk in disks if disk.mounted)
            return lost + status["disk_used_bytes"] + status["ram_used_bytes"]

        waited(lambda: left() == 0, QUIET_SECONDS)
        return left()

    def _status(self) -> dict[str, Any]:
        try:
            return self._world.the_daemon.status()
        except NoStatus as error:
            raise Broken(str(error)) from error

    def _accounts(self) -> str:
        """What is wrong with the accounts, or nothing."""
        status = self._status()
        clients = status["clients"]
        files = nameless_files(self._world.the_daemon.pid)
        pids = sorted(client["pid"] for client in clients)
        if pids != sorted(rank.pid for rank in self._world.all_ranks):
            return f"clients {pids}, and the ranks are {[r.pid for r in self._world.all_ranks]}"
        facts = {
            "in flight": (sum(client["in_flight"] for client in clients), 0),
            "disk": (status["disk_used_bytes"], sum(client["disk_bytes"] for client in clients)),
            "memory": (status["ram_used_bytes"], sum(client["arena_bytes"] for client in clients)),
            "directories": (
                sum(scratch["used_bytes"] for scratch in status["scratch"]),
                status["disk_used_bytes"],
            ),
            "files": (sum(files.values()), status["disk_used_bytes"]),
        }
        wrong = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
        return f"accounts are not what they should be: {wrong}" if wrong else ""

    def _daemon_leaks(self) -> str:
        now = holdings(self._world.the_daemon.pid)
        clients = len(self._world.all_ranks)
        wanted = Counter(self._world.empty.fds)
        for kind, count in self._for_a_client.items():
            wanted[kind] += clients * count
        # A client has no file in a directory that was out of use when it came.
        files = {file for rank in self._world.all_ranks for file in nameless_files(rank.pid)}
        wanted[NAMELESS] = len(files)
        if now.fds != wanted:
            return f"fds of the daemon: {dict(now.fds)}, not {dict(wanted)}"
        if (now.arenas, now.shm) != (clients, 0):
            return f"the daemon maps {now.arenas} arenas, {now.shm} of /dev/shm; {clients} clients"
        if now.threads > self._world.empty.threads:
            return f"{now.threads} threads of the daemon, not {self._world.empty.threads}"
        return ""

    def _rank_leaks(self) -> str:
        for job in (self._world.survivors, self._world.victims):
            for number, rank in enumerate(job.ranks):
                now, first = holdings(rank.pid), self._of_a_rank[job.name, number]
                fds = Counter(now.fds)
                files = fds.pop(NAMELESS, 0)
                few = not 1 <= files <= first.fds[NAMELESS]
                fds[NAMELESS] = first.fds[NAMELESS]
                held = (fds, now.arenas, now.threads)
                if few or held != (first.fds, first.arenas, first.threads):
                    return f"{rank.name} holds {now}, after its first step {first}"
        return ""

    def _names(self) -> str:
        names = {entry for disk in self._world.disks for entry in disk.entries()}
        names |= set(os.listdir(self._world.socket_dir)) ^ {"attach.sock", "io.sock"}
        return f"names in the directories: {names}" if names else ""

    def _read_log(self) -> None:
        with self._world.daemon_log.open() as log:
            log.seek(self._log_read)
            said = log.read()
            self._log_read = log.tell()
        if "Traceback" in said or "CRITICAL" in said:
            raise Broken(f"the daemon's log: {said}")

    def _sample(self, name: str, number: int, pid: int) -> None:
        self._samples.setdefault(name, []).append((number, holdings(pid).own_bytes))


def growth(name: str, samples: list[tuple[int, int]]) -> float:
    """Bytes a round, of rounds and bytes, by the line of least squares; raises when they grow."""
    count = len(samples)
    x_mean = sum(x for x, _ in samples) / count
    y_mean = sum(y for _, y in samples) / count
    spread = sum((x - x_mean) ** 2 for x, _ in samples)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in samples) / spread
    grown = slope * (samples[-1][0] - samples[0][0])
    if grown > GROWTH_BYTES:
        raise Broken(f"{name} grew by {slope:.0f} bytes a round, {grown:.0f} in all")
    return slope
