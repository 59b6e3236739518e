"""Fds that clients hand over, of files whose file system never answers again."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from discod.closer import MOST_PENDING
from discod.wire import PROTOCOL_VERSION
from discod.wire.fds import receive_message, receive_packet, send_message
from discod.wire.messages import Attach, Done, Hello, Ping, Refused, StatusReply, StatusRequest
from discod.wire.paths import socket_paths
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import MIB, RawClient, attach, greet, make_arena
from tests.integration.conftest import privileged_or_skip

Connect = Callable[..., RawClient]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Fds of a file that does not answer: one open for reading, one ``O_PATH``.

    They are never closed here, since that would hang; the kernel lets go of them with the server.
    """
    privileged_or_skip("mounting")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")  # no privilege would help
    point = tmp_path / "mount"
    point.mkdir()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.hung_fuse", str(point)], stdin=there, cwd=ROOT
    )
    there.close()
    here.settimeout(20)
    _, fds = receive_packet(here)
    yield fds[0], fds[1]
    here.close()
    assert server.wait(10) == 0
    for fd in fds:
        with contextlib.suppress(OSError):  # ENOTCONN: it is closed, and its server is gone
            os.close(fd)


def test_handed_over(daemon: Daemon, raw_client: Connect, hung: tuple[int, int]) -> None:
    """One client with a file of a dead server would stop the daemon for all, for ever."""
    victim = raw_client(daemon)
    reading, path_only = hung
    arena = make_arena(MIB)

    def refused(fds: list[int], *, resume: bool) -> str:
        lifeline, _, reply, _ = attach(daemon.socket_dir, MIB, fds, resume=resume)
        lifeline.close()
        assert isinstance(victim.ask(Ping), Done)
        assert isinstance(reply, Refused)
        return reply.text

    assert "no memfd" in refused([reading], resume=False)
    assert "no memfd" in refused([path_only], resume=False)
    assert "is open" in refused([arena, reading], resume=True)
    assert "on another file system" in refused([arena, path_only], resume=True)
    assert "fds" in refused([arena, reading, path_only], resume=False)

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(socket_paths(daemon.socket_dir)[0]))
    send_message(connection, Hello(PROTOCOL_VERSION, "test"), [reading])
    connection.close()
    connection, _ = greet(daemon.socket_dir)
    send_message(connection, StatusRequest(), [reading, path_only])
    receive_message(connection, StatusReply)
    connection.close()
    connection, _ = greet(daemon.socket_dir)
    send_message(connection, Hello(PROTOCOL_VERSION, "again"), [reading])
    refusal, _ = receive_message(connection, Refused)
    assert "protocol" in refusal.text
    connection.close()
    assert isinstance(victim.ask(Ping), Done)

    other = raw_client(daemon)
    assert isinstance(other.write(0, 0, MIB), Done), "honest clients are served as ever"
    os.close(arena)


def test_many(daemon: Daemon, hung: tuple[int, int]) -> None:
    """A client could fill the daemon with fds that do not close; others must not pay for it."""
    reading, _ = hung

    def attempt() -> str:
        connection, _ = greet(daemon.socket_dir)
        send_message(connection, Attach(MIB, 0, "test", False), [reading] * 60)
        reply, _ = receive_message(connection, Refused)
        connection.close()
        return reply.text

    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for _ in range(2):
        assert "60 fds" in attempt()
    for _ in range(10):
        assert "do not close" in attempt()
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < before + 2 * MOST_PENDING
    assert len(os.listdir(f"/proc/{daemon.pid}/task")) < 20


def test_they_are_closed_in_the_end(daemon: Daemon, raw_client: Connect, tmp_path: Path) -> None:
    """Fds of files that are only slow would stay open for ever."""
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    client = raw_client(daemon)
    assert isinstance(client.ask(Ping), Done)
    fds = [os.open(path, os.O_RDONLY) for _ in range(60)]
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for _ in range(20):
        connection, _ = greet(daemon.socket_dir)
        send_message(connection, Attach(MIB, 0, "test", False), fds)
        reply, _ = receive_message(connection, Refused)
        assert "60 fds" in reply.text or "do not close" in reply.text
        connection.close()
    eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before)
    assert isinstance(client.ask(Ping), Done)
    for fd in fds:
        os.close(fd)
