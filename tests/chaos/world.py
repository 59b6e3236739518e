"""What the adversary acts on: one daemon after the other, two disks, and two jobs.

The first job survives: nobody kills its ranks, and its gradients are the proof. The second one's
ranks are killed and come again; all steps that its living ranks complete must be right as well.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from discod.status import NoStatus
from discod.wire.paths import socket_paths
from tests.chaos.disk import Disk
from tests.chaos.processes import Holdings, holdings, nameless_files
from tests.chaos.rank import MIN_BYTES, PERIOD
from tests.chaos.ranks import Job, Rank
from tests.helpers.daemon import Daemon, eventually

ARENA = "2MiB"
"""A step saves 3.5 MiB: the rest goes to disk."""
RECONNECT_SECONDS = 15.0
"""Above any start of a daemon on a busy machine; ``away`` waits for it."""
RAM = "1GiB"
IDLE_SECONDS = 300
"""A daemon ends by itself when whoever runs this was killed."""
RECLAIM_SECONDS = 10.0
"""Then it failed; how long it really took is reported."""


@dataclass(slots=True)
class Counts:
    """What has happened so far."""

    kills: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    reclaim_seconds: list[float] = field(default_factory=list)
    ready_seconds: list[float] = field(default_factory=list)
    retried_steps: int = 0


class World:
    """All of it, started.

    Args:
        folder: For sockets, logs and disks; its path is short.
        ranks: Of the first job.
        others: Of the second.
        mount: Whether disks are to be file systems of their own.
        distributed: Whether the first job is a process group with averaged gradients.
    """

    def __init__(
        self, folder: Path, *, ranks: int, others: int, mount: bool, distributed: bool
    ) -> None:
        self.socket_dir = folder / "s"
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.faults = folder / "faults"
        self.set_faults("")
        self.counts = Counts()
        self.disks: list[Disk] = []
        self.survivors = Job("survivor")
        self.victims = Job("victim")
        self._folder = folder
        self._daemons = 0
        self._ranks_made = 0
        self._distributed = distributed
        self.daemon: Daemon | None = None
        try:
            for number in range(2):
                folder_of_disk = folder / f"disk-{number}"
                self.disks.append(Disk(folder_of_disk, mount=mount))
            self.empty_bytes = [disk.free_bytes() for disk in self.disks]
            self._make_expected(ranks, others)
            self.start_daemon()
            self.empty = self._settled()
            for job, count in ((self.survivors, ranks), (self.victims, others)):
                job.ranks = [self.make_rank(job, number, count) for number in range(count)]
            for rank in self.all_ranks:
                rank.said()
        except BaseException:
            self.close()
            raise

    @property
    def all_ranks(self) -> list[Rank]:
        return [*self.survivors.ranks, *self.victims.ranks]

    @property
    def the_daemon(self) -> Daemon:
        """The one that runs, or ran last."""
        if self.daemon is None:
            raise RuntimeError("no daemon was started yet")
        return self.daemon

    # Daemons

    def start_daemon(self, *, ready: bool = True) -> None:
        """A new one, after the end of the one before. What failed or was full is well again."""
        self.set_faults("")
        started = time.monotonic()
        self.daemon = Daemon(
            *("--ram", RAM, "--disk", "8GiB", "--exit-idle", str(IDLE_SECONDS)),
            scratch=[disk.path for disk in self.disks],
            socket_dir=self.socket_dir,
            log_path=self.daemon_log,
            env={"DISCOD_FAULTS": str(self.faults)},
        )
        if ready:
            self.daemon.wait_until_ready()
            self.counts.ready_seconds.append(time.monotonic() - started)

    def kill_daemon(self) -> None:
        """SIGKILL, and wait for its end."""
        self.the_daemon.kill()
        self.counts.kills["daemon SIGKILL"] += 1

    def wait_until_listening(self) -> None:
        """Until the new daemon accepts connections: clients resume from now on."""
        attach_path, _ = socket_paths(self.socket_dir)

        def listens() -> bool:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(str(attach_path))
                except (FileNotFoundError, ConnectionRefusedError):
                    return False
            return True

        eventually(listens, 20, "the new daemon listening")

    def set_faults(self, rules: str) -> None:
        """The disks fail by these rules from now on."""
        new = self.faults.with_suffix(".new")
        new.write_text(rules)
        new.rename(self.faults)

    def heal(self) -> None:
        """Nothing fails, is full or is stopped any more."""
        self.set_faults("")
        for disk in self.disks:
            disk.free()

    @property
    def daemon_log(self) -> Path:
        return self.logs / "daemon.log"

    # Ranks

    def make_rank(self, job: Job, number: int, count: int = 1, *, plain: bool = False) -> Rank:
        """A new process of a job, which begins to attach."""
        settings: dict[str, Any] = {"rank": number, "world": count}
        if not plain:
            settings["connect"] = {
                "socket_dir": str(self.socket_dir),
                "arena": ARENA,
                "min_bytes": MIN_BYTES,
                "reconnect_timeout": RECONNECT_SECONDS,
            }
        if self._distributed and job is self.survivors:
            settings["store"] = str(self._folder / ("plain-store" if plain else "store"))
        self._ranks_made += 1
        form = "plain" if plain else f"{self._ranks_made:04d}"
        return Rank(f"{job.name}-{number}-{form}", settings, self.logs)

    def settle(self) -> None:
        """Until all ranks are attached to the daemon that runs now."""
        for rank in self.all_ranks:
            rank.tell("settle")
        for rank in self.all_ranks:
            rank.said()

    def replace(self, number: int, *, reclaim: bool = True) -> None:
        """SIGKILL a rank of the second job and start another in its place, which begins.

        Args:
            number: Which.
            reclaim: Wait until the daemon has freed all of it first, and note how long it took.
        """
        old = self.victims.ranks[number]
        try:
            files = set(nameless_files(old.pid))
        except FileNotFoundError:
            files = set()
        if not old.ended:  # it may have detached by itself, if it was told to
            old.kill()
            self.counts.kills["rank SIGKILL"] += 1
            if reclaim:
                self.counts.reclaim_seconds.append(self._reclaimed(old, files))
        old.close()
        rank = self.make_rank(self.victims, number)
        self.victims.ranks[number] = rank
        rank.begin_step()

    def _reclaimed(self, rank: Rank, files: set[tuple[int, int]]) -> float:
        """Seconds from now until neither the rank nor a byte or file of it is in the daemon."""
        killed = time.monotonic()
        while True:
            if self._gone(rank.pid, files):
                return time.monotonic() - killed
            if time.monotonic() - killed > RECLAIM_SECONDS:
                raise AssertionError(
                    f"{rank.name} (pid {rank.pid}) was killed {RECLAIM_SECONDS:g} s ago and is "
                    f"still there: {self.the_daemon.status()}"
                )
            time.sleep(0.002)

    def _gone(self, pid: int, files: set[tuple[int, int]]) -> bool:
        try:
            status = self.the_daemon.status()
        except NoStatus:
            return False
        clients = status["clients"]
        held = holdings(self.the_daemon.pid)
        return (
            all(client["pid"] != pid for client in clients)
            and status["disk_used_bytes"] == sum(client["disk_bytes"] for client in clients)
            and status["ram_used_bytes"] == sum(client["arena_bytes"] for client in clients)
            and held.arenas == len(clients)
            and files.isdisjoint(nameless_files(self.the_daemon.pid))
        )

    def _make_expected(self, ranks: int, others: int) -> None:
        for job, count in ((self.survivors, ranks), (self.victims, others)):
            processes = [self.make_rank(job, number, count, plain=True) for number in range(count)]
            try:
                for rank in processes:
                    for rank.step in range(PERIOD):
                        rank.begin_step()
                job.expected = [[s["fingerprint"] for s in rank.said()] for rank in processes]
            finally:
                for rank in processes:
                    rank.close()

    def _settled(self) -> Holdings:
        """What the daemon holds when connections that were closed are closed there too."""
        pid = self.the_daemon.pid
        eventually(lambda: not holdings(pid).fds["anon_inode:[pidfd]"], 20, "the end of the last")
        return holdings(pid)

    # The end

    def close(self) -> None:
        """End all processes and unmount; idempotent."""
        for rank in self.all_ranks:
            rank.close()
        if self.daemon is not None:
            self.daemon.close()
        for disk in self.disks:
            disk.close()


def waited(probe: Callable[[], bool], seconds: float) -> bool:
    """Whether ``probe`` came true in time."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
