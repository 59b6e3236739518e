"""Disk space of clients that were hung up on: nobody gets more than --disk by being hung up on."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from discod.wire import PROTOCOL_VERSION
from discod.wire.fds import send_message
from discod.wire.messages import Attach, Detach, Done, GiveUp, Hello, Read, Refused, Write
from discod.wire.paths import socket_paths
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import MIB, RawClient, attach, greet, make_arena

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]
ROOT = Path(__file__).parents[3]


def used(daemon: Daemon) -> int:
    return int(daemon.status()["disk_used_bytes"])


def lose(client: RawClient) -> None:
    """End its I/O connection, and wait until the daemon has hung up for that."""
    client.dealer.close(linger=0)
    assert client.lifeline.recv(1) == b""
    client.detach()


@pytest.fixture
def daemon(start_daemon: Start) -> Daemon:
    return start_daemon("--disk", "32MiB")


def test_lost_again_and_again(daemon: Daemon, raw_client: Connect) -> None:
    """Each time the quota would be given out anew, while the client's fd keeps the old blocks."""
    client = raw_client(daemon)
    client.arena[: 16 * MIB] = data = os.urandom(16 * MIB)
    token = client.write(0, 0, 16 * MIB).checksum
    other = raw_client(daemon)
    for _ in range(3):
        before = used(daemon)
        lose(client)
        eventually(lambda: len(daemon.status()["clients"]) == 1)
        assert used(daemon) == before, "what it still holds is not counted"
        assert other.write(0, 0, 16 * MIB)
        client.attach(daemon.socket_dir)
        client.arena[:] = bytes(16 * MIB)
        assert isinstance(client.read(0, 0, 16 * MIB, token), Done)
        assert client.arena[:] == data
    assert used(daemon) <= 32 * MIB
    client.close()
    other.close()
    eventually(lambda: used(daemon) == 0)


def test_breach_gives_everything_back(daemon: Daemon, raw_client: Connect) -> None:
    """A hostile client would keep blocks that count as free, a new file's worth each time."""
    for _ in range(3):
        client = raw_client(daemon)
        assert isinstance(client.write(0, 0, 16 * MIB), Done)
        client.dealer.send(b"garbage")
        assert client.lifeline.recv(1) == b""
        eventually(lambda: used(daemon) == 0)
        assert os.fstat(client.files[0]).st_blocks == 0


HOLD = """
import sys; from pathlib import Path
from tests.helpers.raw_client import MIB, RawClient
client = RawClient(Path(sys.argv[1]))
client.write(0, 0, 8 * MIB)
client.dealer.close(linger=0)
assert client.lifeline.recv(1) == b""
print("lost", flush=True)
sys.stdin.read()
"""


def test_parked_until_the_process_ends(daemon: Daemon) -> None:
    """Space of a trainer that was killed before it came back would be lost to all others."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(daemon.socket_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "lost\n"
    eventually(lambda: not daemon.status()["clients"])
    assert used(daemon) >= 8 * MIB
    process.send_signal(signal.SIGKILL)
    process.communicate()
    eventually(lambda: used(daemon) == 0)


def test_what_a_client_says_before_it_is_hung_up_on(daemon: Daemon, raw_client: Connect) -> None:
    """Its files would be kept until its process ends, though it has said that it is through."""
    for _ in range(5):
        client = raw_client(daemon)
        client.write(0, 0, 8 * MIB)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            client.send(Read, file=0, offset=0, slot=0, length=MIB, checksum=b"", urgent=True)
            client.dealer.close(linger=100)
            client.context.term()
            send_message(client.lifeline, Detach())
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: used(daemon) == 0)


def give_up(daemon: Daemon, *files: int) -> None:
    """As a client does that has lost its lifeline."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.connect(str(socket_paths(daemon.socket_dir)[0]))
        one.shutdown(socket.SHUT_RD)
        send_message(one, Hello(PROTOCOL_VERSION, "test"))
        send_message(one, GiveUp(), files)


STRANGER = """
import sys; from pathlib import Path
from types import SimpleNamespace
from tests.integration.hostile.test_accounts import give_up
give_up(SimpleNamespace(socket_dir=Path(sys.argv[1])), *map(int, sys.argv[2:]))
"""


def test_given_up(daemon: Daemon, raw_client: Connect) -> None:
    """Wherever the files are just then, they must go; and only by the word of their own client."""
    client = raw_client(daemon)
    client.write(0, 0, 8 * MIB)
    command = [sys.executable, "-c", STRANGER, str(daemon.socket_dir), *map(str, client.files)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, pass_fds=client.files, cwd=ROOT, env=env, check=True)
    give_up(daemon)  # of no files: of nobody's
    assert isinstance(client.read(0, 0, MIB), Done), "another process has given them up"
    lose(client)
    eventually(lambda: not daemon.status()["clients"])
    subprocess.run(command, pass_fds=client.files, cwd=ROOT, env=env, check=True)
    give_up(daemon)
    assert used(daemon) >= 8 * MIB
    give_up(daemon, *client.files)
    eventually(lambda: used(daemon) == 0)
    assert os.fstat(client.files[0]).st_blocks == 0
    other = raw_client(daemon)
    other.write(0, 0, 8 * MIB)
    give_up(daemon, *other.files)  # and it has not hung up yet
    eventually(lambda: used(daemon) == 0)
    assert other.lifeline.recv(1) == b""


def test_given_up_while_it_comes_back(daemon: Daemon, raw_client: Connect) -> None:
    """A close() that follows a resume which was too slow: whichever is served first."""
    for _ in range(5):
        client = raw_client(daemon)
        client.write(0, 0, 8 * MIB)
        lose(client)
        lifeline, _ = greet(daemon.socket_dir)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            attach = Attach(client.arena_bytes, -1, "test", resume=True)
            send_message(lifeline, attach, [client.arena_fd, *client.files])
            lifeline.close()
            give_up(daemon, *client.files)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: used(daemon) == 0)
        assert not daemon.status()["clients"]
        assert not daemon.status()["ram_used_bytes"]


def test_resume_that_is_refused_leaves_them_parked(daemon: Daemon, raw_client: Connect) -> None:
    """A client that asks for too much once would lose its data, or the files be charged twice."""
    client = raw_client(daemon)
    client.arena[:MIB] = data = os.urandom(MIB)
    token = client.write(0, 0, MIB).checksum
    before = used(daemon)
    lose(client)
    wrong = make_arena(MIB, seals=0)
    lifeline, _, reply, _ = attach(daemon.socket_dir, MIB, [wrong, *client.files], resume=True)
    assert isinstance(reply, Refused)
    lifeline.close()
    os.close(wrong)
    # And one that hangs up in the midst of it, as a client does that waits no longer.
    arena = make_arena(MIB)
    lifeline, *_ = attach(daemon.socket_dir, MIB, [arena, *client.files], resume=True)
    lifeline.close()
    os.close(arena)
    client.attach(daemon.socket_dir)
    client.arena[:MIB] = bytes(MIB)
    assert isinstance(client.read(0, 0, MIB, token), Done)
    assert client.arena[:MIB] == data
    assert used(daemon) == before
    assert isinstance(client.ask(Write, file=0, offset=0, slot=0, length=MIB), Done)
