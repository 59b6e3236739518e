"""Ends: of clients, of their children, and of the daemon, in the midst of I/O."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from discod.exits import Exit
from discod.server import DRAIN_SECONDS
from discod.wire.fds import send_message
from discod.wire.messages import Attach, Done, Ping, Read, Refused, Reply, Write
from discod.wire.paths import ATTACH_SOCKET, IO_SOCKET
from tests.helpers import odd_daemon
from tests.helpers.daemon import Daemon, eventually, shm_entries
from tests.helpers.raw_client import MIB, RawClient, attach, greet, make_arena

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]

TRAINER = """
import os, sys, time
from pathlib import Path
from discod.wire.messages import Write
from tests.helpers.raw_client import MIB, RawClient
client = RawClient(Path(sys.argv[1]), 64 * MIB)
client.write(0, 0, 64 * MIB)
if sys.argv[2] == "forked" and os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
for _ in range(200):
    client.send(Write, file=0, offset=0, slot=0, length=64 * MIB)
print("busy", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def nothing_is_left(scratch: Path, socket_dir: Path) -> Iterator[None]:
    """Of any daemon or client: no file but the sockets of one that was killed."""
    shm = shm_entries()
    yield
    assert os.listdir(scratch) == []
    assert set(os.listdir(socket_dir)) <= {ATTACH_SOCKET, IO_SOCKET}
    assert shm_entries() <= shm


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class TestClients:
    @pytest.mark.parametrize("forked", ["alone", "forked"])
    def test_killed_in_the_midst_of_writes(
        self, daemon: Daemon, raw_client: Connect, forked: str
    ) -> None:
        """A dead rank would hold memory and disk, and slow down the others, for ever."""
        other = raw_client(daemon)
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(daemon.socket_dir), forked],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert trainer.stdout is not None
        lines = [trainer.stdout.readline() for _ in range(2 if forked == "forked" else 1)]
        child = next((int(line) for line in lines if line.strip().isdecimal()), None)
        eventually(lambda: daemon.status()["ram_used_bytes"] == 80 * MIB)
        eventually(lambda: sum(c["in_flight"] for c in daemon.status()["clients"]) > 10)
        assert daemon.status()["disk_used_bytes"] >= 64 * MIB
        trainer.kill()
        began = time.monotonic()
        try:
            eventually(lambda: len(daemon.status()["clients"]) == 1)
            eventually(lambda: not daemon.status()["disk_used_bytes"])
            assert time.monotonic() - began < 1.0
            status = daemon.status()
            assert status["ram_used_bytes"] == 16 * MIB
            assert status["disk_used_bytes"] == status["scratch"][0]["used_bytes"] == 0
            assert isinstance(other.write(0, 0, MIB), Done)
            assert "memfd:discod-test" in Path(f"/proc/{daemon.pid}/maps").read_text()
        finally:
            if child is not None:
                os.kill(child, signal.SIGKILL)
            trainer.stdout.close()
            trainer.wait()

    def test_disk_space_comes_back_though_a_child_holds_the_file(
        self, daemon: Daemon, raw_client: Connect
    ) -> None:
        """Dataloader workers that outlive the trainer's attachment would hold its disk space."""
        client = raw_client(daemon)
        assert isinstance(client.write(0, 0, 8 * MIB), Done)
        held = os.dup(client.files[0])
        client.close()
        eventually(lambda: not daemon.status()["clients"])
        eventually(lambda: os.fstat(held).st_blocks == 0)
        os.close(held)

    def test_hung_up_on(self, daemon: Daemon, raw_client: Connect) -> None:
        """A client that breaks the protocol could not come back, or would keep what it has."""
        client = raw_client(daemon)
        client.arena[:MIB] = os.urandom(MIB)
        token = client.write(0, 0, MIB).checksum
        client.dealer.send(b"garbage")
        assert client.lifeline.recv(1) == b""
        eventually(lambda: daemon.status()["disk_used_bytes"] == 0)
        assert os.fstat(client.files[0]).st_blocks == 0, "its fd keeps space that nobody counts"
        client.detach()
        client.attach(daemon.socket_dir)
        assert client.read(0, 0, MIB, token).kind == "io"
        assert isinstance(client.write(0, 0, MIB), Done)

    def test_hangs_up_and_comes_back(self, daemon: Daemon, raw_client: Connect) -> None:
        """A client that had lost its I/O connection alone would find its file emptied."""
        client = raw_client(daemon)
        client.arena[:MIB] = data = os.urandom(MIB)
        token = client.write(0, 0, MIB).checksum
        client.detach()
        client.attach(daemon.socket_dir)
        client.arena[:MIB] = bytes(MIB)
        assert isinstance(client.read(0, 0, MIB, token), Done)
        assert client.arena[:MIB] == data

    def test_gives_up_an_attach_and_tries_again(self, daemon: Daemon, raw_client: Connect) -> None:
        """On a busy node the answer comes too late: the file would be emptied, or be said to be
        another client's, and the training end."""
        client = raw_client(daemon)
        client.arena[:MIB] = data = os.urandom(MIB)
        token = client.write(0, 0, MIB).checksum
        client.detach()
        whole = Attach(client.arena_bytes, -1, "test", True)
        for _ in range(20):
            lifeline, _ = greet(daemon.socket_dir)
            send_message(lifeline, whole, [client.arena_fd, *client.files])
            lifeline.close()
        client.attach(daemon.socket_dir)
        client.arena[:MIB] = bytes(MIB)
        assert isinstance(client.read(0, 0, MIB, token), Done)
        assert client.arena[:MIB] == data
        eventually(lambda: len(daemon.status()["clients"]) == 1)
        assert daemon.status()["ram_used_bytes"] == client.arena_bytes

    def test_lost_its_io_connection(self, daemon: Daemon, raw_client: Connect) -> None:
        """A client whose answers cannot be delivered would wait for them for ever."""
        client = raw_client(daemon, 64 * MIB)
        client.arena[: 64 * MIB] = data = os.urandom(64 * MIB)
        token = client.write(0, 0, 64 * MIB).checksum
        for _ in range(20):
            client.send(Write, file=0, offset=0, slot=0, length=64 * MIB)
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] > 10)
        client.dealer.close(linger=0)
        assert client.lifeline.recv(1) == b""
        client.detach()
        client.attach(daemon.socket_dir)
        client.arena[: 64 * MIB] = bytes(64 * MIB)
        assert isinstance(client.read(0, 0, 64 * MIB, token), Done)
        assert client.arena[: 64 * MIB] == data

    def test_back_while_its_io_is_in_flight(self, start_daemon: Start, raw_client: Connect) -> None:
        """Two tenants would have the same file, or the client be turned away for good."""
        daemon = start_daemon("--threads", "2", "--chunk", "256MiB")
        client = raw_client(daemon, 256 * MIB)
        assert isinstance(client.write(0, 0, 256 * MIB), Done)
        for _ in range(3):
            client.send(Write, file=0, offset=0, slot=0, length=256 * MIB)
            client.send(Read, file=0, offset=0, slot=0, length=4096, checksum=b"", urgent=True)
            eventually(lambda: daemon.status()["clients"][0]["in_flight"] > 0)
            client.dealer.send(b"garbage")
            assert client.lifeline.recv(1) == b""
            client.detach()
            client.attach(daemon.socket_dir)
            assert len(daemon.status()["clients"]) == 1
            assert isinstance(client.ask(Ping), Done)


class TestFds:
    def test_none_left(self, start_daemon: Start, raw_client: Connect, socket_dir: Path) -> None:
        """Out of fds the daemon would die, spin, or never accept anybody again."""
        daemon = start_daemon(prefix=["prlimit", "--nofile=128:128"])
        client = raw_client(daemon)
        assert isinstance(client.ask(Ping), Done)
        crowd = []
        for _ in range(60):
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            crowd[-1].connect(str(socket_dir / ATTACH_SOCKET))
        eventually(lambda: "attaches are unfinished" in daemon.log)
        assert isinstance(client.write(0, 0, MIB), Done), "those who are in must be served"
        late = raw_client(daemon)
        assert isinstance(late.write(0, 0, MIB), Done), "the crowd keeps others out"
        assert daemon.log.count("attaches are unfinished") == 1
        for connection in crowd:
            connection.close()


class TestResume:
    def test_after_sigkill(self, daemon: Daemon, start_daemon: Start, raw_client: Connect) -> None:
        """A daemon that dies would take the step, and the job, with it."""
        client = raw_client(daemon, 16 * MIB)
        client.arena[: 8 * MIB] = data = os.urandom(8 * MIB)
        token = client.write(4096, 0, 8 * MIB).checksum
        whole = {"file": 0, "offset": 4096, "slot": 0, "length": 8 * MIB}
        for _ in range(50):
            client.send(Write, **whole)
        daemon.kill()
        second = start_daemon("--disk", "8MiB")
        client.detach()
        client.attach(second.socket_dir)
        client.arena[:] = bytes(16 * MIB)
        assert isinstance(client.read(4096, 8 * MIB, 8 * MIB, token), Done)
        assert client.arena[8 * MIB :] == data
        (entry,) = second.status()["clients"]
        assert entry["disk_bytes"] == pytest.approx(
            os.fstat(client.files[0]).st_blocks * 512, rel=0.01
        )
        assert isinstance(client.write(0, 0, 4096), Done), "over the quota, but not growing"
        assert client.write(1 << 40, 0, 4096).kind == "disk-full"
        client.close()
        eventually(lambda: second.status()["disk_used_bytes"] == 0)

    def test_when_others_have_taken_the_memory(
        self, start_daemon: Start, raw_client: Connect
    ) -> None:
        """A restart between two jobs would end the first one: it has its memory all along."""
        first = start_daemon("--ram", "32MiB")
        client = raw_client(first, 16 * MIB)
        first.kill()
        second = start_daemon("--ram", "32MiB")
        others = [raw_client(second, 16 * MIB) for _ in range(2)]
        client.detach()
        client.attach(second.socket_dir)
        assert isinstance(client.ask(Ping), Done)
        assert second.status()["ram_used_bytes"] == 48 * MIB
        lifeline, _, reply, _ = attach(second.socket_dir, MIB, [fd := make_arena(MIB)])
        lifeline.close()
        os.close(fd)
        assert isinstance(reply, Refused), "what is over the budget must count"
        client.close()
        for other in others:
            other.close()
        eventually(lambda: second.status()["ram_used_bytes"] == 0)

    def test_with_several_directories_in_another_order(
        self, start_daemon: Start, raw_client: Connect, tmp_path: Path
    ) -> None:
        """File 1 would become file 0, and every blob be read from the wrong one."""
        directories = [tmp_path / name for name in ("a", "b")]
        for directory in directories:
            directory.mkdir()
        daemon = start_daemon(scratch=directories)
        client = raw_client(daemon)
        tokens = []
        for file in range(2):
            client.arena[:MIB] = bytes([file + 1]) * MIB
            tokens.append(client.write(0, 0, MIB, file=file).checksum)
        daemon.kill()
        second = start_daemon(scratch=directories[::-1])
        client.detach()
        client.attach(second.socket_dir)
        for file in range(2):
            assert isinstance(client.read(0, 0, MIB, tokens[file], file=file), Done)
            assert client.arena[:MIB] == bytes([file + 1]) * MIB

    @pytest.mark.parametrize("kind", ["a file with a name", "another client's", "the same twice"])
    def test_with_a_foreign_file(
        self, daemon: Daemon, raw_client: Connect, tmp_path: Path, kind: str
    ) -> None:
        """A client could have the daemon overwrite a file, or another client's data."""
        victim = tmp_path / "victim"
        victim.write_text("precious")
        victim.chmod(0o600)
        path_fd = os.open(victim, os.O_PATH)
        other = raw_client(daemon)
        lost = os.open(daemon.scratch, os.O_TMPFILE | os.O_RDWR, 0o600)
        fds = {
            "a file with a name": [path_fd],
            "another client's": other.files,
            "the same twice": [lost, lost],
        }[kind]
        arena = make_arena(MIB)
        lifeline, _, reply, _ = attach(daemon.socket_dir, MIB, [arena, *fds], resume=True)
        assert isinstance(reply, Refused)
        assert "file" in reply.text
        lifeline.close()
        for fd in (arena, path_fd, lost):
            os.close(fd)
        assert isinstance(other.write(0, 0, 4096), Done)
        assert victim.read_text() == "precious"
        assert daemon.status()["ram_used_bytes"] == other.arena_bytes

    def test_with_more_files_than_directories(self, daemon: Daemon) -> None:
        """A daemon started with fewer --scratch would serve half of the client's blobs."""
        arena = make_arena(MIB)
        open_fds = [os.open(daemon.scratch, os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(2)]
        fds = [os.open(f"/proc/self/fd/{fd}", os.O_PATH) for fd in open_fds]
        lifeline, _, reply, _ = attach(daemon.socket_dir, MIB, [arena, *fds], resume=True)
        assert isinstance(reply, Refused)
        assert "2 scratch files" in reply.text
        assert "--scratch" in reply.text
        lifeline.close()
        for fd in (arena, *fds, *open_fds):
            os.close(fd)
        assert daemon.status()["disk_used_bytes"] == 0


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_idle(
        self, daemon: Daemon, raw_client: Connect, socket_dir: Path, number: signal.Signals
    ) -> None:
        """A service manager would have to kill it, and the sockets be left behind."""
        client = raw_client(daemon)
        assert isinstance(client.ask(Ping), Done)
        began = time.monotonic()
        os.kill(daemon.pid, number)
        assert daemon.wait() == Exit.OK
        assert time.monotonic() - began < 2
        assert os.listdir(socket_dir) == []
        assert "discod ends" in daemon.log
        assert "Traceback" not in daemon.log

    def test_under_load(self, daemon: Daemon, raw_client: Connect, socket_dir: Path) -> None:
        """What a client was told to be in flight would be lost, or the exit take for ever."""
        clients = [raw_client(daemon, 64 * MIB) for _ in range(2)]
        for client in clients:
            client.write(0, 0, 64 * MIB)
        sent = {
            client: {
                client.send(Write, file=0, offset=i * 4 * MIB, slot=i * 4 * MIB, length=4 * MIB)
                for i in [*range(16)] * 5
            }
            for client in clients
        }
        eventually(lambda: sum(c["in_flight"] for c in daemon.status()["clients"]) > 20)
        began = time.monotonic()
        daemon.terminate()
        answered = {client: answers_until_the_end(client) for client in clients}
        assert daemon.wait() == Exit.OK
        assert time.monotonic() - began < 5
        for client in clients:
            assert set(answered[client]) == sent[client]
            assert all(isinstance(reply, Done) for reply in answered[client].values())
        assert os.listdir(socket_dir) == []

    def test_more_than_can_be_done_in_time(self, start_daemon: Start, raw_client: Connect) -> None:
        """The exit would take until a full queue is written, and be cut short by SIGKILL."""
        daemon = start_daemon("--chunk", "1MiB")
        client = raw_client(daemon, 64 * MIB)
        client.write(0, 0, 64 * MIB)
        count = 20_000
        for _ in range(count):
            client.send(Write, file=0, offset=0, slot=0, length=64 * MIB)
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] > 1000)
        began = time.monotonic()
        daemon.terminate()
        assert client.lifeline.recv(1) == b""
        took_seconds = time.monotonic() - began
        answered = answers_until_the_end(client)
        assert daemon.wait() == Exit.OK
        assert DRAIN_SECONDS < took_seconds < 5
        assert all(isinstance(reply, Done) for reply in answered.values()), "resent, not failed"
        assert 0 < len(answered) < count
        assert "left to the next daemon" in daemon.log

    def test_a_client_that_dies_meanwhile(self, daemon: Daemon, raw_client: Connect) -> None:
        """The daemon would wait for answers that nobody awaits any more."""
        client = raw_client(daemon, 64 * MIB)
        client.write(0, 0, 64 * MIB)
        for _ in range(1000):
            client.send(Write, file=0, offset=0, slot=0, length=64 * MIB)
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] > 100)
        began = time.monotonic()
        daemon.terminate()
        eventually(lambda: "in flight" in daemon.log)
        client.close()
        assert daemon.wait() == Exit.OK
        assert time.monotonic() - began < 2

    def test_refuses_attaches(self, daemon: Daemon, raw_client: Connect) -> None:
        """A client would attach to a daemon that is about to end."""
        client = raw_client(daemon, 64 * MIB)
        client.write(0, 0, 64 * MIB)
        for _ in range(100):
            client.send(Write, file=0, offset=0, slot=0, length=64 * MIB)
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] > 50)
        daemon.terminate()
        eventually(lambda: "in flight" in daemon.log)
        with pytest.raises((ConnectionError, FileNotFoundError)):
            greet(daemon.socket_dir)
        client.close()
        assert daemon.wait() == Exit.OK

    def test_a_second_signal_forces(self, daemon: Daemon, raw_client: Connect) -> None:
        """Nobody could end it at once without leaving the sockets behind."""
        client = raw_client(daemon, 64 * MIB)
        client.write(0, 0, 64 * MIB)
        for _ in range(2000):
            client.send(Write, file=0, offset=0, slot=0, length=64 * MIB)
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] > 1000)
        daemon.terminate()
        eventually(lambda: "in flight" in daemon.log)
        began = time.monotonic()
        daemon.terminate()
        assert daemon.wait() == Exit.FORCED
        assert time.monotonic() - began < 1
        assert os.listdir(daemon.socket_dir) == []


def test_a_broken_engine_ends_the_daemon(
    start_daemon: Start, raw_client: Connect, socket_dir: Path
) -> None:
    """It would go on without its I/O threads, and all trainers wait for it for ever."""
    daemon = start_daemon(prefix=odd_daemon.prefix("broken"))
    client = raw_client(daemon)
    client.send(Write, file=0, offset=0, slot=0, length=MIB)
    assert daemon.wait() == Exit.CRASHED
    assert "I/O thread io-0-" in daemon.log
    assert "the schedule is broken" in daemon.log
    again = start_daemon()
    client.detach()
    client.attach(socket_dir)
    assert isinstance(client.write(0, 0, MIB), Done)
    assert again.status()["clients"]


def answers_until_the_end(client: RawClient) -> dict[int, Reply]:
    """All answers that come before the daemon hangs up, and those that are there by then."""
    answers: dict[int, Any] = {}
    client.lifeline.settimeout(10)
    assert client.lifeline.recv(1) == b""
    with contextlib.suppress(AssertionError):
        while True:
            reply = client.next_answer(timeout=0.2)
            assert reply.seq not in answers, "answered twice"
            answers[reply.seq] = reply
    return answers
