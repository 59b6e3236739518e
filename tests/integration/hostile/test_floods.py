"""Peers that come in thousands, say too much or read nothing: others are served all the same."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from discod.router import SEND_QUEUE
from discod.wire.codec import encode
from discod.wire.messages import Done, Ping, Write
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import MIB, RawClient

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]
ROOT = Path(__file__).parents[3]

LONGEST_SECONDS = 5.0
"""Of any answer, on a machine that is busy with other tests."""


@contextlib.contextmanager
def crowd(kind: str, daemon: Daemon, count: int) -> Iterator[subprocess.Popen[str]]:
    """A hostile process, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.crowd", kind, str(daemon.socket_dir), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ping(client: RawClient) -> float:
    """Seconds until the answer."""
    began = time.monotonic()
    assert isinstance(client.ask(Ping), Done)
    return time.monotonic() - began


def serve_until_done(process: subprocess.Popen[str], victim: RawClient) -> float:
    """Ping until the crowd is through; the longest answer."""
    assert process.stdout is not None
    longest, deadline = 0.0, time.monotonic() + 50
    while not select.select([process.stdout], [], [], 0)[0]:
        longest = max(longest, ping(victim))
        assert process.poll() is None, "the crowd has died"
        assert time.monotonic() < deadline, "the crowd is not through"
    assert process.stdout.readline() == "done\n"
    return longest


def fds(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("io_connects", 3000),
        ("attached_io_connects", 3000),
        ("dealers", 300),
        ("silent_attaches", 2000),
        ("half_said", 1000),
        ("storm", 3000),
    ],
)
def test_thousands_of_connections(
    start_daemon: Start, raw_client: Connect, kind: str, count: int
) -> None:
    """libzmq aborts the daemon when fds run out; or others could not get in, or wait for ever."""
    daemon = start_daemon(prefix=["prlimit", "--nofile=1536:1536"])
    victim = raw_client(daemon)
    ping(victim)
    before = fds(daemon)
    with crowd(kind, daemon, count) as process:
        longest = serve_until_done(process, victim)
        late = raw_client(daemon)
        assert isinstance(late.write(0, 0, MIB), Done), "it keeps honest clients out"
        late.close()
        assert fds(daemon) < 250
    assert longest < LONGEST_SECONDS
    eventually(lambda: fds(daemon) <= before)
    ping(victim)


class Deaf(RawClient):
    """libzmq takes in two answers for it, and then leaves the others to the daemon."""

    def connect(self, socket_dir: Path, identity: bytes) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, identity)
        dealer.set(zmq.RCVHWM, 1)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(f"ipc://{socket_dir / 'io.sock'}")
        return dealer


def test_reads_no_answers(daemon: Daemon, raw_client: Connect) -> None:
    """A client that only sends would fill the daemon's memory with answers."""
    victim, deaf = raw_client(daemon), Deaf(daemon.socket_dir)
    message = encode(Ping(1, deaf.welcome.epoch))
    deaf.lifeline.setblocking(False)
    tries = 0

    def hung_up() -> bool:
        try:
            return deaf.lifeline.recv(1) == b""
        except BlockingIOError:
            return False

    while not hung_up():
        for _ in range(1000):
            with contextlib.suppress(zmq.Again):
                deaf.dealer.send(message, zmq.DONTWAIT)
        tries += 1
        assert tries < SEND_QUEUE
        assert ping(victim) < LONGEST_SECONDS
    peak = Path(f"/proc/{daemon.pid}/status").read_text().split("VmHWM:")[1].split()[0]
    assert int(peak) < 150 << 10
    eventually(lambda: "takes no answers" in daemon.log)
    deaf.close()


def test_stopped_for_a_time(daemon: Daemon, raw_client: Connect, tmp_path: Path) -> None:
    """A trainer in a debugger would lose answers, or hold up others."""
    victim = raw_client(daemon)
    with crowd("flood", daemon, 60_000) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        assert max(ping(victim) for _ in range(100)) < LONGEST_SECONDS
        assert isinstance(victim.write(0, 0, MIB), Done)
        os.kill(process.pid, signal.SIGCONT)
        assert max(ping(victim) for _ in range(20)) < LONGEST_SECONDS
    eventually(lambda: len(daemon.status()["clients"]) == 1)


def test_fair_share(
    daemon: Daemon, raw_client: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """One client with a full queue, and pings without end, would stop the others' training."""
    victim = raw_client(daemon)

    def measure(seconds: float) -> tuple[int, float]:
        """Round trips of a write and a read of 1 MiB and a ping, and the longest ping."""
        rounds, longest, end = 0, 0.0, time.monotonic() + seconds
        while time.monotonic() < end or not rounds:
            token = victim.write(0, 0, MIB).checksum
            assert isinstance(victim.read(0, MIB, MIB, token), Done)
            longest = max(longest, ping(victim))
            rounds += 1
        return rounds, longest

    alone, _ = measure(0.5)
    with crowd("flood", daemon, 20_000) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        flooded, longest = measure(2.0)
    with capsys.disabled():
        print(
            f"\nrounds a second: {alone / 0.5:.0f} alone, {flooded / 2:.0f} in a flood; "
            f"longest ping {longest * 1000:.0f} ms"
        )
    assert flooded >= 3
    assert longest < LONGEST_SECONDS
    assert isinstance(victim.ask(Write, file=0, offset=0, slot=0, length=MIB), Done)
