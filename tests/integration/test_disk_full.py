"""Disks and quotas without room: nothing is lost, errors are clear, and every byte is counted."""

import contextlib
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import disco_client
from disco_client import connection
from discod.wire.messages import Done, Write
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.faults import Rules
from tests.helpers.mounts import as_seen_by, ext4, fill, free_bytes
from tests.helpers.raw_client import MIB, RawClient
from tests.helpers.steps import SETTINGS, expected, step
from tests.integration.conftest import ClearError, privileged_or_skip

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]
Attach = Callable[..., None]

ROUNDS = int(os.environ.get("DISCOD_TEST_ROUNDS", "200"))
"""Of each way to use a blob; the reports that these are from ask for 1000."""


class SmallDisk:
    """A daemon on a disk of 48 MiB that is nobody else's, with a quota beyond it.

    Attributes:
        seen: The directory, by a path that works in this process.
    """

    def __init__(self, path: Path, socket_dir: Path) -> None:
        self.directory = path / "scratch"
        self.directory.mkdir()
        self.rules = Rules(path / "rules")
        self.daemon = Daemon(
            "--disk",
            "1GiB",
            scratch=self.directory,
            socket_dir=socket_dir,
            log_path=path / "log",
            prefix=ext4(path / "image", self.directory, 48),
            env=self.rules.environment,
        )
        self.daemon.wait_until_ready()
        self.seen = as_seen_by(self.daemon, self.directory)
        self.free_bytes = free_bytes(self.seen)

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.daemon.pid}/fd"))

    def assert_empty(self) -> None:
        """Nothing is counted or taken: after some seconds, when idle files have been trimmed."""
        eventually(lambda: self.daemon.status()["disk_used_bytes"] == 0, what="a count of 0")
        assert all(client["disk_bytes"] == 0 for client in self.daemon.status()["clients"])
        eventually(lambda: free_bytes(self.seen) == self.free_bytes, what="an empty disk")


@pytest.fixture(scope="module")
def shared_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    privileged_or_skip("mounting")
    socket_dir = Path(tempfile.mkdtemp(prefix="discod-test-"))
    disk = SmallDisk(tmp_path_factory.mktemp("disk"), socket_dir)
    yield disk
    disk.daemon.close()
    shutil.rmtree(socket_dir)


@pytest.fixture
def disk(shared_disk: SmallDisk) -> Iterator[SmallDisk]:
    yield shared_disk
    shared_disk.rules.clear()
    for filler in shared_disk.seen.glob("filler"):
        filler.unlink()
    disco_client.close()
    eventually(lambda: shared_disk.daemon.status()["clients"] == [])


# Full


def test_full_file_system(disk: SmallDisk, attach_to: Attach, clear_error: ClearError) -> None:
    """A full disk would cost the run, a hang, or bits; or stay full for ever."""
    attach_to(disk.daemon, **SETTINGS)
    filler = fill(disk.seen, leave_bytes=MIB)
    with clear_error(disco_client.ScratchFull, "disk full") as caught:
        step(0)
    for part in (
        str(disk.directory),
        "No space left on device",
        "of the quota of 1.0 GiB are used",
        "the file system has",
        "--disk (DISCOD_DISK)",
        "DISCOD_ARENA",
    ):
        assert part in str(caught.value)
    filler.unlink()
    assert step(1) == expected(1), "there is room"
    fill(disk.seen)
    assert step(2) == expected(2), "what it had reserved is its own"


def test_full_file_system_and_a_large_arena(disk: SmallDisk, attach_to: Attach) -> None:
    """What has room in RAM would be refused because the disk has none."""
    attach_to(disk.daemon, **(SETTINGS | {"arena": "8MiB"}))
    fill(disk.seen)
    for seed in range(2):
        assert step(seed) == expected(seed)


def test_room_is_made_while_a_step_runs(disk: SmallDisk, attach_to: Attach) -> None:
    """A disk that was full for a moment, in the middle of a step, would cost the run."""
    attach_to(disk.daemon, **SETTINGS)
    filler = fill(disk.seen, leave_bytes=6 * MIB)  # enough for the first step's blobs alone

    def make_room() -> None:
        filler.unlink(missing_ok=True)

    assert step(0, after_forward=make_room) == expected(0)
    assert step(1) == expected(1)


def test_quota_that_another_client_frees(
    start_daemon: Start, raw_client: Connect, attach_to: Attach, clear_error: ClearError
) -> None:
    """A quota that was used up once would end the run, though another job has ended since."""
    daemon = start_daemon("--disk", "10MiB")
    attach_to(daemon, **SETTINGS)
    assert step(0) == expected(0)
    disco_client.close()
    eventually(lambda: daemon.status()["disk_used_bytes"] == 0)
    other = raw_client(daemon)
    assert isinstance(other.write(0, 0, 9 * MIB), Done)
    attach_to(daemon, **SETTINGS)
    with clear_error(disco_client.ScratchFull, "quota used up") as caught:
        step(1)
    for part in (str(daemon.scratch), "the quota is used up", "quota of 10.0 MiB", "--disk"):
        assert part in str(caught.value)
    other.close()
    eventually(lambda: len(daemon.status()["clients"]) == 1)
    assert step(1) == expected(1)


# The quota over all clients


def reserved_bytes(daemon: Daemon) -> int:
    """What the daemon's nameless files take on the disk, as the kernel has it."""
    device = os.stat(daemon.scratch).st_dev
    total = 0
    for entry in os.scandir(f"/proc/{daemon.pid}/fd"):
        try:
            status = os.stat(entry.path)
        except FileNotFoundError:  # closed since
            continue
        if status.st_dev == device and status.st_nlink == 0:
            total += status.st_blocks * 512
    return total


def test_racing_clients_never_exceed_the_quota(start_daemon: Start, raw_client: Connect) -> None:
    """A node's disk would be filled by several jobs that each keep to the limit (DC-095)."""
    daemon = start_daemon("--disk", "64MiB", "--threads", "8")
    clients = [raw_client(daemon) for _ in range(4)]
    racing = True
    highest = 0

    def watch() -> None:
        nonlocal highest
        while racing:
            highest = max(highest, reserved_bytes(daemon))

    def grow(client: RawClient) -> int:
        seqs = [client.send(Write, file=0, offset=i * MIB, slot=0, length=MIB) for i in range(32)]
        return sum(isinstance(client.answer(seq), Done) for seq in seqs)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(len(clients)) as pool:
        written = list(pool.map(grow, clients))
    racing = False
    watcher.join()
    # An ext4 file of many extents has a few blocks more, which tell where they are.
    assert 0 < highest <= 64 * MIB + len(clients) * (64 << 10)
    assert sum(written) <= 64
    status = daemon.status()
    assert status["disk_used_bytes"] == sum(c["disk_bytes"] for c in status["clients"]) <= 64 * MIB
    for client in clients[:2]:
        client.close()
    eventually(lambda: len(daemon.status()["clients"]) == 2)
    assert sum(grow(client) for client in clients[2:]) == 64, "what was freed can be had"
    assert reserved_bytes(daemon) <= 64 * MIB + len(clients) * (64 << 10)


# Accounts


def save(manager: disco_client.DiskOffloadManager, number: int) -> Any:
    return manager.save_tensor(torch.full((1 << 14,), float(number)))  # 64 KiB


def test_cycles_leave_nothing(disk: SmallDisk, attach_to: Attach) -> None:
    """A run would end after some thousand steps with a full disk that is empty (DC-093)."""
    attach_to(disk.daemon, arena="2MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    handles: deque[Any] = deque()
    own_fds = fds = 0
    for number in range(5 * ROUNDS):
        handles.append(save(manager, number))
        if len(handles) > 40:
            manager.cleanup_tensor(handles.popleft())
        if number == 100:
            own_fds, fds = len(os.listdir("/proc/self/fd")), disk.fds()
    assert disco_client.stats().written_bytes > 0
    assert (len(os.listdir("/proc/self/fd")), disk.fds()) == (own_fds, fds)
    manager.cleanup()
    disk.assert_empty()


def save_most(manager: disco_client.DiskOffloadManager, count: int) -> list[Any]:
    """As many as there is room for, with a disk that refuses some."""
    handles = []
    with contextlib.suppress(disco_client.errors.RoomError, disco_client.errors.ScratchError):
        for number in range(count):
            handles.append(save(manager, number))
    return handles


def load_and_free(manager: disco_client.DiskOffloadManager, handles: list[Any]) -> None:
    """A disk that refuses the write which would make room for a load may cost that load."""
    for number, handle in enumerate(handles):
        with contextlib.suppress(disco_client.errors.RoomError, disco_client.errors.ScratchError):
            assert manager.load_tensor(handle)[0] == number
        manager.cleanup_tensor(handle)


def drop(manager: disco_client.DiskOffloadManager, handles: list[Any]) -> None:
    handles.clear()


WAYS: dict[str, Callable[[disco_client.DiskOffloadManager, list[Any]], None]] = {
    "cleanup_tensor": lambda manager, handles: (
        [manager.cleanup_tensor(h) for h in handles] and None
    ),
    "load and free": load_and_free,
    "abort": drop,
    "cleanup": lambda manager, handles: manager.cleanup(),
}


def test_every_byte_is_given_back(disk: SmallDisk, attach_to: Attach) -> None:
    """A counter that only one path decrements would refuse every save in the end (DC-094)."""
    attach_to(disk.daemon, arena="2MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    residency = connection.current().session._residency
    per_round = 40  # of 64 KiB: an arena and a quarter
    for rules in ((), ("pwritev EIO every=3",), ("pwritev ENOSPC every=2",)):
        disk.rules.set(*rules)
        for way in WAYS.values():
            for _ in range(ROUNDS // per_round):
                handles = save_most(manager, per_round)
                way(manager, handles)
                del handles
    disk.rules.clear()
    session = connection.current().session
    session.wait_for(lambda: residency._held.in_flight == 0)
    assert residency.live_blobs == 0
    assert residency.arena_used_bytes == residency.scratch.used_bytes == 0
    disk.assert_empty()
    for number, handle in enumerate([save(manager, number) for number in range(per_round)]):
        assert manager.load_tensor(handle)[0] == number, "with the disk in order, all come back"


def test_clients_that_die_leave_no_byte(disk: SmallDisk) -> None:
    """Each killed trainer would take a little of the disk with it, until nothing starts."""
    fds = disk.fds()
    for number in range(ROUNDS):
        if number % 2:  # whose writes must have room: the one before is gone, and what it had
            eventually(lambda: disk.daemon.status()["clients"] == [])
        client = RawClient(disk.daemon.socket_dir, arena_bytes=MIB)
        seqs = [
            client.send(Write, file=0, offset=i * MIB, slot=0, length=MIB)
            for i in range(1 + number % 3)
        ]
        if number % 2:
            answers = [client.answer(seq) for seq in seqs]
            assert all(isinstance(answer, Done) for answer in answers), answers
        client.close()
    eventually(lambda: disk.daemon.status()["clients"] == [])
    disk.assert_empty()
    assert disk.daemon.status()["ram_used_bytes"] == 0
    # At the beginning a connection that asked for the status may still have been there.
    eventually(lambda: disk.fds() <= fds, what="the end of all connections")
