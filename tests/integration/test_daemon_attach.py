"""Getting in: what is checked of a client, and that nobody who fails the checks does any harm."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from discod import __version__
from discod.wire import PROTOCOL_VERSION
from discod.wire.codec import encode
from discod.wire.fds import MAX_FDS, receive_message, send_message
from discod.wire.messages import (
    Attach,
    Attached,
    Done,
    Failed,
    Hello,
    Ping,
    Refused,
    StatusReply,
    StatusRequest,
    Welcome,
    Write,
)
from discod.wire.paths import socket_paths
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import MIB, RawClient, attach, greet, make_arena
from tests.integration.conftest import privileged_or_skip

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]
SIZE = 4 * MIB


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    """All tests here share it: none may do it any harm."""
    return shared_daemon


@pytest.fixture(autouse=True)
def alive(daemon: Daemon) -> Iterator[None]:
    """Whatever the test does to the daemon: afterwards it serves, and holds nothing of it."""
    yield
    client = RawClient(daemon.socket_dir)
    assert isinstance(client.ask(Ping), Done)
    client.close()
    eventually(lambda: not daemon.status()["clients"])
    status = daemon.status()
    assert status["ram_used_bytes"] == status["disk_used_bytes"] == 0
    assert os.listdir(daemon.scratch) == []


def ended(connection: socket.socket, timeout: float = 10.0) -> bool:
    """Whether the daemon hangs up."""
    connection.settimeout(timeout)
    try:
        while connection.recv(1 << 18):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def refusal(daemon: Daemon, arena_bytes: int, fds: Sequence[int], *, resume: bool = False) -> str:
    """The text of the refusal that this attach must get."""
    lifeline, _, reply, _ = attach(daemon.socket_dir, arena_bytes, fds, resume=resume)
    assert isinstance(reply, Refused), "it was let in"
    assert ended(lifeline)
    lifeline.close()
    for fd in fds:
        os.close(fd)
    return reply.text


def test_welcome(daemon: Daemon, raw_client: Connect) -> None:
    """A client could not size its arena, or would not notice a new daemon."""
    client = raw_client(daemon, SIZE)
    welcome = client.welcome
    assert (welcome.protocol, welcome.version) == (PROTOCOL_VERSION, __version__)
    assert welcome.pid == daemon.pid
    assert welcome.directories == (str(daemon.scratch),)
    lifeline, now = greet(daemon.socket_dir)
    assert now.epoch == welcome.epoch
    assert now.ram_free_bytes == now.ram_bytes - SIZE
    lifeline.close()
    client.close()


def test_path_fds_do_not_open_the_file(daemon: Daemon, raw_client: Connect) -> None:
    """A client could read and write a scratch file behind the daemon's back."""
    client = raw_client(daemon, SIZE)
    (fd,) = client.files
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pread(fd, 1, 0)
    client.close()


@pytest.mark.parametrize("flaw", ["unsealed", "half sealed", "short", "long", "file", "pipe"])
def test_arena_that_could_be_pulled_away(daemon: Daemon, tmp_path: Path, flaw: str) -> None:
    """A client that shrinks its arena would kill the daemon with SIGBUS."""
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    fd, said = {
        "unsealed": lambda: (make_arena(SIZE, seals=0), "not sealed"),
        "half sealed": lambda: (make_arena(SIZE, seals=4), "not sealed"),
        "short": lambda: (make_arena(SIZE - 4096), f"{SIZE - 4096} bytes, not the {SIZE}"),
        "long": lambda: (make_arena(SIZE + 4096), f"{SIZE + 4096} bytes, not the {SIZE}"),
        "file": lambda: (os.open(path, os.O_RDWR), "no memfd"),
        "pipe": lambda: (os.pipe()[0], "no memfd"),
    }[flaw]()
    assert said in refusal(daemon, SIZE, [fd])


@pytest.mark.parametrize("size", [0, -1, 4095, 1 << 47, (1 << 63) - 1])
def test_arena_of_an_impossible_size(daemon: Daemon, size: int) -> None:
    """Sizes from the wire would reach the kernel, or overflow later."""
    assert "size" in refusal(daemon, size, [make_arena(4096)])


def test_hugetlbfs_arena(daemon: Daemon) -> None:
    """Its pages can be missing when they are touched: SIGBUS."""
    try:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        os.ftruncate(fd, SIZE)
    except OSError as error:
        pytest.skip(f"no hugetlbfs here: {error}")  # no privilege would help
    import fcntl

    fcntl.fcntl(fd, 1033, 6)
    assert "hugetlbfs" in refusal(daemon, SIZE, [fd])


@pytest.mark.parametrize(("fds", "resume"), [(0, False), (2, False), (1, True), (MAX_FDS, False)])
def test_wrong_number_of_fds(daemon: Daemon, fds: int, resume: bool) -> None:
    """The daemon would take one fd for another, or leak those that it did not expect."""
    assert "fds" in refusal(daemon, SIZE, [make_arena(SIZE) for _ in range(fds)], resume=resume)


def test_memory_budget(start_daemon: Start, tmp_path: Path, raw_client: Connect) -> None:
    """Clients would together take more memory than --ram, without a word which setting it is."""
    (tmp_path / "s").mkdir()
    daemon = start_daemon(
        "--ram", "10MiB", scratch=tmp_path / "s", socket_dir=Path(f"/tmp/discod-t-{os.getpid()}")
    )
    one = raw_client(daemon, 6 * MIB)
    text = refusal(daemon, 6 * MIB, [make_arena(6 * MIB)])
    holder = f"1 client holds 6.0 MiB, the most by pid {os.getpid()} (6.0 MiB;"
    for part in ("6.0 MiB", "4.0 MiB of 10.0 MiB", holder, "a smaller arena", "DISCOD_ARENA"):
        assert part in text
    assert "--ram" in text
    two = raw_client(daemon, 3 * MIB)
    text = refusal(daemon, 2 * MIB, [make_arena(2 * MIB)])
    for part in ("2.0 MiB (the least there is)", "2 clients hold 9.0 MiB", "end them", "--ram"):
        assert part in text
    assert "ask for a smaller arena" not in text, "there is none"
    one.close()
    two.close()
    eventually(lambda: daemon.status()["ram_used_bytes"] == 0)
    raw_client(daemon, 10 * MIB).close()
    daemon.terminate()
    assert daemon.wait() == 0
    daemon.socket_dir.rmdir()


def test_another_protocol(daemon: Daemon) -> None:
    """Two releases would misunderstand each other in silence."""
    lifeline, reply = greet(daemon.socket_dir, protocol=PROTOCOL_VERSION + 1)
    assert isinstance(reply, Refused)
    assert f"protocol {PROTOCOL_VERSION}," in reply.text
    assert f"protocol {PROTOCOL_VERSION + 1}" in reply.text
    assert ended(lifeline)
    lifeline.close()


def test_another_user(daemon: Daemon) -> None:
    """Another user of the node could fill the disk and the memory."""
    privileged_or_skip("becoming another user")
    os.chmod(daemon.socket_dir, 0o755)
    os.chmod(daemon.socket_dir / "attach.sock", 0o666)
    code = (
        "import os, sys; from pathlib import Path; from tests.helpers.raw_client import greet;"
        "os.setuid(12345); print(greet(Path(sys.argv[1]))[1].text)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(daemon.socket_dir)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    os.chmod(daemon.socket_dir, 0o700)
    os.chmod(daemon.socket_dir / "attach.sock", 0o600)
    assert f"uid {os.getuid()}" in result.stdout
    assert "uid 12345" in result.stdout


PACKETS = [
    b"\x00",
    b"garbage",
    bytes(1 << 17),
    encode(Ping(1, 1)),
    encode(Attach(SIZE, 0, "too early", False)),
    encode(StatusReply("{}")),
]


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("packet", PACKETS, ids=range(len(PACKETS)))
def test_garbage_in_the_conversation(daemon: Daemon, packet: bytes, greeted: bool) -> None:
    """A stray process would crash the daemon, or hold a connection for ever."""
    if greeted:
        if packet == PACKETS[4]:
            packet = encode(Hello(1, "again"))
        connection, _ = greet(daemon.socket_dir)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(socket_paths(daemon.socket_dir)[0]))
    connection.send(packet)
    reply, _ = receive_message(connection, Refused)
    assert "protocol" in reply.text
    assert ended(connection)
    connection.close()


def test_hangs_up_in_the_conversation(daemon: Daemon) -> None:
    """Clients that die while they attach would leave fds, memory or files behind."""
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for _ in range(20):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(socket_paths(daemon.socket_dir)[0]))
        connection.close()
        connection, _ = greet(daemon.socket_dir)
        connection.close()
        connection, _ = greet(daemon.socket_dir)
        arena = make_arena(SIZE)
        send_message(connection, Attach(SIZE, -1, "gone", False), [arena])
        connection.close()
        os.close(arena)
    eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before)


def test_half_open_connections_are_dropped(daemon: Daemon, raw_client: Connect) -> None:
    """Connections that say nothing would use up the daemon's fds."""
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(str(socket_paths(daemon.socket_dir)[0]))
    greeted, _ = greet(daemon.socket_dir)
    client = raw_client(daemon)
    assert isinstance(client.ask(Ping), Done), "others have to wait for it"
    for connection in (silent, greeted):
        reply, _ = receive_message(connection, Refused)
        assert "5 s" in reply.text
        assert ended(connection)
        connection.close()
    assert isinstance(client.ask(Ping), Done), "the time limit is for the conversation alone"
    client.close()


def test_speaking_on_the_lifeline(daemon: Daemon, raw_client: Connect) -> None:
    """A client that confuses its sockets would go unnoticed, or wake the daemon without end."""
    client = raw_client(daemon)
    client.lifeline.send(b"hello?")
    assert ended(client.lifeline)
    client.close()


def test_status_in_the_conversation(daemon: Daemon) -> None:
    """The status would need an arena, or leave a client behind."""
    connection, reply = greet(daemon.socket_dir)
    assert isinstance(reply, Welcome)
    send_message(connection, StatusRequest())
    status, _ = receive_message(connection, StatusReply)
    assert '"clients": []' in status.json
    assert ended(connection)
    connection.close()


class TestMessages:
    @pytest.mark.parametrize(
        "data", [b"", b"\xc1", b"x" * 100, bytes(60_000), encode(Hello(1, "x"))], ids=range(5)
    )
    def test_garbage_ends_the_client(
        self, daemon: Daemon, data: bytes, raw_client: Connect
    ) -> None:
        """A client out of its mind would crash the daemon or be served on."""
        other = raw_client(daemon)
        client = raw_client(daemon)
        before = daemon.log.count("broke the protocol")
        client.dealer.send(data)
        assert ended(client.lifeline)
        eventually(lambda: daemon.log.count("broke the protocol") == before + 1)
        assert isinstance(other.ask(Ping), Done)
        client.close()
        other.close()

    def test_requests_after_the_garbage(self, daemon: Daemon, raw_client: Connect) -> None:
        """I/O would run on an arena that is being unmapped: the daemon would die."""
        for _ in range(20):
            client = raw_client(daemon)
            client.dealer.send(b"garbage")
            for i in range(50):
                client.send(Write, file=0, offset=i * MIB, slot=0, length=MIB)
            assert ended(client.lifeline)
            while client.dealer.poll(20):
                assert client.next_answer().kind == "refused"
            assert os.fstat(client.files[0]).st_size == 0
            client.close()

    def test_many_parts(self, daemon: Daemon, raw_client: Connect) -> None:
        """A message in a form that was not foreseen would crash the daemon."""
        client = raw_client(daemon)
        client.dealer.send_multipart([b"a", b"b", b"c"])
        assert ended(client.lifeline)
        client.close()

    def test_huge_message(self, daemon: Daemon, raw_client: Connect) -> None:
        """A message could fill the daemon's memory."""
        client = raw_client(daemon)
        client.dealer.send(bytes(50 << 20))
        assert isinstance(client.ask(Ping), Done), "ZeroMQ drops it, and connects again"
        peak = Path(f"/proc/{daemon.pid}/status").read_text().split("VmHWM:")[1].split()[0]
        assert int(peak) < 100 << 10

    def test_foreign_identity(self, daemon: Daemon, raw_client: Connect) -> None:
        """Somebody could write to another client's scratch file, or be ignored without a word."""
        client = raw_client(daemon)
        stranger = client.connect(daemon.socket_dir, b"\x01" + os.urandom(15))
        stranger.send(encode(Write(7, client.welcome.epoch, 0, 0, 0, 4096)))
        stranger.send(b"garbage")
        assert stranger.poll(10_000)
        client.dealer, own = stranger, client.dealer
        reply = client.next_answer()
        assert isinstance(reply, Failed)
        assert (reply.seq, reply.kind) == (7, "refused")
        client.dealer = own
        stranger.close(linger=0)
        assert isinstance(client.ask(Ping), Done)
        assert "no client's identity" in daemon.log
        client.close()

    def test_stolen_identity(self, daemon: Daemon, raw_client: Connect) -> None:
        """A second connection with a client's identity would get its answers."""
        client = raw_client(daemon)
        assert isinstance(client.ask(Ping), Done)
        thief = client.connect(daemon.socket_dir, client.identity)
        seq = client.send(Ping)
        assert isinstance(client.answer(seq), Done)
        assert not thief.poll(100)
        thief.close(linger=0)
        client.close()

    def test_old_epoch(self, daemon: Daemon, raw_client: Connect) -> None:
        """A request meant for an earlier daemon would be carried out by this one."""
        client = raw_client(daemon)
        reply = client.ask(Write, epoch=5, file=0, offset=0, slot=0, length=4096)
        assert (reply.kind, reply.epoch) == ("refused", 5)
        assert "epoch" in reply.text
        assert os.fstat(client.files[0]).st_size == 0
        client.close()


def test_nothing_is_kept_of_past_clients(daemon: Daemon, raw_client: Connect) -> None:
    """Fds, threads or memory would grow from job to job until the daemon fails."""

    def held() -> dict[str, int]:
        return {kind: len(os.listdir(f"/proc/{daemon.pid}/{kind}")) for kind in ("fd", "task")}

    def a_client() -> None:
        client = raw_client(daemon, SIZE)
        assert isinstance(client.write(0, 0, MIB), Done)
        client.close()

    a_client()
    eventually(lambda: not daemon.status()["clients"])
    before = held()
    for _ in range(50):
        a_client()
    eventually(lambda: not daemon.status()["clients"])
    # The first count may still include what was just being closed.
    eventually(lambda: all(count <= before[kind] for kind, count in held().items()))
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "memfd" not in maps


def test_many_at_once(daemon: Daemon) -> None:
    """All ranks of a node connect at the same moment: some would be turned away."""
    sockets = []
    for _ in range(200):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(socket_paths(daemon.socket_dir)[0]))
        sockets.append(connection)
    arenas = []
    for connection in sockets:
        send_message(connection, Hello(PROTOCOL_VERSION, "x"))
    for connection in sockets:
        receive_message(connection, Welcome)
        arenas.append(make_arena(4096))
        send_message(connection, Attach(4096, -1, "x" * 200, False), arenas[-1:])
    for connection in sockets:
        _, fds = receive_message(connection, Attached)
        os.close(fds[0])
    status = daemon.status()
    assert len(status["clients"]) + status["clients_left_out"] == 200
    for connection, arena in zip(sockets, arenas, strict=True):
        connection.close()
        os.close(arena)


def test_frozen_client_keeps_nobody_waiting(daemon: Daemon, raw_client: Connect) -> None:
    """A client that reads no answers would block the daemon, or end it."""
    frozen = raw_client(daemon)
    other = raw_client(daemon)
    for _ in range(20_000):
        frozen.send(Ping)
    poller = select.poll()
    poller.register(frozen.lifeline, select.POLLIN)
    assert isinstance(other.ask(Ping), Done)
    assert not poller.poll(0)
    frozen.close()
    other.close()
