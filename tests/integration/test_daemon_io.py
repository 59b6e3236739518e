"""Reads and writes through a real daemon, on real file systems that are full, odd or broken."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from discod.trimming import IDLE_SECONDS
from discod.wire import PAGE_BYTES
from discod.wire.messages import Cancel, Done, Failed, Promote, Read, Trim, Write
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import MIB, RawClient
from tests.integration.conftest import privileged_or_skip

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]


@pytest.fixture
def shared(shared_daemon: Daemon, raw_client: Connect) -> RawClient:
    """A client of a daemon that other tests use too."""
    return raw_client(shared_daemon)


def fill(client: RawClient, start: int, length: int) -> bytes:
    """Put random bytes into the arena."""
    data = os.urandom(length)
    client.arena[start : start + length] = data
    return data


def assert_kept(client: RawClient, length: int, *, file: int = 0) -> None:
    """Bytes written and read back through another slot are the same."""
    data = fill(client, 0, length)
    written = client.write(0, 0, length, file=file)
    assert isinstance(written, Done), written
    read = client.read(0, length, length, written.checksum, file=file)
    assert isinstance(read, Done), read
    assert client.arena[length : 2 * length] == data


@pytest.mark.parametrize("checksum", ["off", "sampled", "full"])
@pytest.mark.parametrize("length", [PAGE_BYTES, MIB, 20 * MIB + PAGE_BYTES])
def test_write_and_read(
    start_daemon: Start, raw_client: Connect, checksum: str, length: int
) -> None:
    """What is loaded would not be what was saved."""
    daemon = start_daemon("--checksum", checksum, "--chunk", "1MiB")
    assert_kept(raw_client(daemon, 64 * MIB), length)


def test_large_and_many(daemon: Daemon, raw_client: Connect) -> None:
    """Extents, slots or answers would be mixed up when many are under way at once."""
    one, two = raw_client(daemon), raw_client(daemon)
    count, size = 128, 64 << 10
    for client in (one, two):
        client.saved = [fill(client, i * size, size) for i in range(count)]  # type: ignore[attr-defined]  # the test's own
    writes = [
        (client, i, client.send(Write, file=0, offset=i * size, slot=i * size, length=size))
        for i in range(count)
        for client in (one, two)
    ]
    tokens: dict[tuple[RawClient, int], bytes] = {}
    for client, i, seq in writes:
        done = client.answer(seq)
        assert isinstance(done, Done)
        tokens[client, i] = done.checksum
    for client in (one, two):
        client.arena[:] = bytes(len(client.arena))
    reads = []
    for client, i, _ in reversed(writes):
        to = {"offset": i * size, "slot": i * size, "length": size}
        urgent = i % 3 == 0
        fields = {"file": 0, "checksum": tokens[client, i], "urgent": urgent} | to
        reads.append((client, i, client.send(Read, **fields)))
    for client, i, seq in reads:
        assert isinstance(client.answer(seq), Done)
        assert client.arena[i * size : (i + 1) * size] == client.saved[i]  # type: ignore[attr-defined]  # the test's own
    for entry in daemon.status()["clients"]:
        assert entry["written_bytes"] == entry["read_bytes"] == count * size


def test_several_directories(start_daemon: Start, raw_client: Connect, tmp_path: Path) -> None:
    """Only one device would be used, or blobs of one be looked for on another."""
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    daemon = start_daemon(scratch=directories)
    client = raw_client(daemon)
    assert client.welcome.directories == tuple(map(str, directories))
    assert len(client.files) == 3
    for file in (2, 1):
        assert_kept(client, MIB * file, file=file)
    used = [entry["used_bytes"] for entry in daemon.status()["scratch"]]
    assert used[0] == 0
    assert used[1] >= MIB
    assert used[2] >= 2 * MIB
    assert client.ask(Write, file=3, offset=0, slot=0, length=PAGE_BYTES).kind == "refused"


P = PAGE_BYTES
BOUNDS = [
    {"length": 0},
    {"length": -1},
    {"length": P - 1},
    {"slot": 1},
    {"offset": 512},
    {"slot": -1},
    {"offset": -1},
    {"file": -1},
    {"file": 1},
    {"slot": 16 * MIB},
    {"slot": 16 * MIB - P, "length": 2 * P},
    {"slot": (1 << 63) - P},
    {"length": (1 << 63) - P},
    {"offset": (1 << 63) - P},
    {"offset": (1 << 62)},
]


@pytest.mark.parametrize("verb", [Write, Read])
@pytest.mark.parametrize("wrong", BOUNDS, ids=str)
def test_bounds(shared: RawClient, verb: type[Any], wrong: dict[str, int]) -> None:
    """A client could have the daemon touch memory that is not its arena, and kill it."""
    fields: dict[str, Any] = {"file": 0, "offset": 0, "slot": 0, "length": P} | wrong
    if verb is Read:
        fields |= {"checksum": b"", "urgent": True}
    reply = shared.ask(verb, **fields)
    assert isinstance(reply, Failed)
    assert (reply.kind, reply.errno) == ("refused", 0)
    assert verb.__name__ in reply.text


@pytest.mark.parametrize("wrong", [{"file": 1}, {"file": -1}, {"size": 1}, {"size": -1}], ids=str)
def test_bounds_of_trim(shared: RawClient, wrong: dict[str, int]) -> None:
    """A trim of nonsense would cut a file off at the wrong place."""
    assert shared.ask(Trim, **{"file": 0, "size": 0} | wrong).kind == "refused"


@pytest.mark.parametrize("token", [b"\x01", b"x" * 9, b"\x00" * 9, b"\x02" * 64], ids=str)
def test_checksum_of_another_make(shared: RawClient, token: bytes) -> None:
    """A token that cannot be verified would pass as verified."""
    assert shared.read(0, 0, P, token).kind == "refused"


def test_unknown_targets(shared: RawClient) -> None:
    """A cancel that crosses the answer of its target would be an error."""
    assert isinstance(shared.ask(Cancel, target=10**6), Done)
    assert isinstance(shared.ask(Promote, target=10**6), Done)


def test_read_of_what_was_never_written(shared: RawClient) -> None:
    """It would be answered as if it had been read."""
    reply = shared.read(1 << 40, 0, P)
    assert (reply.kind, reply.errno) == ("io", errno.EIO)
    assert "goes past the end of its file: the file ends at 0" in reply.text


LARGE = 32 * MIB
"""Takes the device so long that what is sent in one go is queued before much of it is done."""


@contextmanager
def in_one_go(daemon: Daemon) -> Iterator[None]:
    """All that is sent inside reaches the daemon at the same moment."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_cancel(daemon: Daemon, raw_client: Connect) -> None:
    """What is freed before it is written would be written nevertheless, or never be answered."""
    client = raw_client(daemon, LARGE)
    assert isinstance(client.write(0, 0, LARGE), Done)
    with in_one_go(daemon):
        *kept, last = [
            client.send(Write, file=0, offset=0, slot=0, length=LARGE) for _ in range(20)
        ]
        cancel = client.send(Cancel, target=last)
    assert isinstance(client.answer(cancel), Done)
    cancelled = client.answer(last)
    assert (cancelled.kind, cancelled.errno) == ("cancelled", 0)
    for seq in kept:
        assert isinstance(client.answer(seq), Done)
    assert daemon.status()["clients"][0]["written_bytes"] == 20 * LARGE
    assert isinstance(client.ask(Cancel, target=kept[0]), Done), "done already is no error"


def test_promote(daemon: Daemon, raw_client: Connect) -> None:
    """A prefetch on which the trainer is blocked by now would wait behind all others."""
    client = raw_client(daemon, LARGE)
    assert isinstance(client.write(0, 0, LARGE), Done)
    whole = {"file": 0, "offset": 0, "slot": 0, "length": LARGE, "checksum": b""}
    with in_one_go(daemon):
        queued = [client.send(Read, urgent=False, **whole) for _ in range(20)]
        client.send(Promote, target=queued[-1])
    order = [client.next_answer().seq for _ in range(21)]
    assert order.index(queued[-1]) < 10


def test_an_urgent_read_goes_first(daemon: Daemon, raw_client: Connect) -> None:
    """A trainer blocked on a read would wait for all that is prefetched and written."""
    client = raw_client(daemon, LARGE)
    assert isinstance(client.write(0, 0, LARGE), Done)
    whole = {"file": 0, "offset": 0, "slot": 0, "length": LARGE}
    with in_one_go(daemon):
        for _ in range(10):
            client.send(Write, **whole)
            client.send(Read, urgent=False, checksum=b"", **whole)
        urgent = client.send(Read, urgent=True, checksum=b"", **whole)
    order = [client.next_answer().seq for _ in range(21)]
    assert order.index(urgent) < 10


def test_seq_in_use(daemon: Daemon, raw_client: Connect) -> None:
    """Two requests with one number would mix up their answers, and a cancel hit the wrong one."""
    client = raw_client(daemon, LARGE)
    assert isinstance(client.write(0, 0, LARGE), Done)
    whole = {"file": 0, "offset": 0, "slot": 0, "length": LARGE}
    with in_one_go(daemon):
        seq = client.send(Write, **whole)
        client.send(Write, seq=seq, **whole)
    refused = client.answer(seq)
    assert (refused.kind, "seq" in refused.text) == ("refused", True)
    assert isinstance(client.answer(seq), Done)


class TestNoRoom:
    def test_quota_over_all_clients(self, start_daemon: Start, raw_client: Connect) -> None:
        """Clients would together take more than --disk, or none could use what another freed."""
        daemon = start_daemon("--disk", "10MiB")
        one, two = raw_client(daemon), raw_client(daemon)
        assert isinstance(one.write(0, 0, 6 * MIB), Done)
        full = two.write(0, 0, 6 * MIB)
        assert (full.kind, full.errno) == ("disk-full", 0)
        for part in (str(daemon.scratch), "6.0 MiB of the quota of 10.0 MiB", "--disk"):
            assert part in full.text
        assert isinstance(two.write(0, 0, 4 * MIB), Done)
        assert daemon.status()["disk_used_bytes"] == 10 * MIB
        assert isinstance(one.write(MIB, 0, 5 * MIB), Done), "no growth, so it must succeed"
        one.close()
        eventually(lambda: len(daemon.status()["clients"]) == 1)
        assert isinstance(two.write(4 * MIB, 0, 6 * MIB), Done)

    def test_full_file_system(
        self, start_daemon: Start, raw_client: Connect, tmp_path: Path
    ) -> None:
        """A full disk would be a lost blob, a hang, or a message without path and remedy."""
        privileged_or_skip("mounting")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(32 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        mount = f'mount -o loop {image} {tmp_path / "scratch"} && exec "$@"'
        daemon = start_daemon("--disk", "1GiB", prefix=["unshare", "-m", "sh", "-c", mount, "sh"])
        client = raw_client(daemon)
        written = []
        while len(written) < 16:
            data = fill(client, 0, 2 * MIB)
            reply = client.write(len(written) * 2 * MIB, 0, 2 * MIB)
            if isinstance(reply, Failed):
                break
            written.append(data)
        assert len(written) >= 8
        assert (reply.kind, reply.errno) == ("disk-full", errno.ENOSPC)
        for part in (str(daemon.scratch), "No space left", "of the quota of 1.0 GiB", "--disk"):
            assert part in reply.text
        for i, data in enumerate(written):
            assert isinstance(client.read(i * 2 * MIB, 0, 2 * MIB), Done)
            assert client.arena[: 2 * MIB] == data

    def test_file_size_limit(self, start_daemon: Start, raw_client: Connect) -> None:
        """A short write would count as a whole one."""
        daemon = start_daemon(prefix=["prlimit", f"--fsize={8 * MIB}"])
        client = raw_client(daemon)
        assert isinstance(client.write(0, 0, 8 * MIB), Done)
        reply = client.write(8 * MIB - P, 0, 2 * P)
        assert (reply.kind, reply.errno) == ("disk-full", errno.EFBIG)
        assert isinstance(client.read(0, 0, 8 * MIB), Done)
        assert daemon.status()["disk_used_bytes"] == 8 * MIB


class TestTrim:
    def test_after_idleness(self, daemon: Daemon, raw_client: Connect) -> None:
        """An idle job would hold the disk for ever, or a busy one lose its extents each step."""
        client = raw_client(daemon)
        data = fill(client, 0, MIB)
        assert isinstance(client.write(0, 0, MIB), Done)
        assert isinstance(client.ask(Trim, file=0, size=MIB), Done)
        held = daemon.status()["clients"][0]["disk_bytes"]
        assert held > 16 * MIB, "trimmed at once"
        eventually(
            lambda: daemon.status()["clients"][0]["disk_bytes"] == MIB, timeout=IDLE_SECONDS + 5
        )
        assert os.fstat(client.files[0]).st_size == MIB
        assert isinstance(client.read(0, 0, MIB), Done)
        assert client.arena[:MIB] == data
        assert_kept(client, 4 * MIB)

    def test_not_after_a_write(self, daemon: Daemon, raw_client: Connect) -> None:
        """A trim would cut off what was written after it was asked for."""
        client = raw_client(daemon)
        other = raw_client(daemon)
        assert isinstance(client.write(0, 0, MIB), Done)
        for each in (client, other):
            assert isinstance(each.write(0, 0, MIB), Done)
            assert isinstance(each.ask(Trim, file=0, size=0), Done)
        data = fill(client, 0, MIB)
        assert isinstance(client.write(8 * MIB, 0, MIB), Done)

        def disk_bytes() -> list[int]:
            return [entry["disk_bytes"] for entry in daemon.status()["clients"]]

        eventually(lambda: 0 in disk_bytes(), timeout=IDLE_SECONDS + 5)
        assert isinstance(client.read(8 * MIB, 0, MIB), Done)
        assert client.arena[:MIB] == data
        assert sorted(disk_bytes())[1] > 8 * MIB


class TestDevices:
    @pytest.mark.parametrize(
        ("fs_type", "direct", "warned"), [("ramfs", False, True), ("tmpfs", None, True)]
    )
    def test_in_memory(
        self,
        start_daemon: Start,
        raw_client: Connect,
        scratch: Path,
        fs_type: str,
        direct: bool | None,
        warned: bool,
    ) -> None:
        """Without O_DIRECT the daemon could not be used, or would not say so."""
        privileged_or_skip("mounting")
        mount = f'mount -t {fs_type} -o mode=700 none {scratch} && exec "$@"'
        daemon = start_daemon("--disk", "64MiB", prefix=["unshare", "-m", "sh", "-c", mount, "sh"])
        (entry,) = daemon.status()["scratch"]
        assert entry["fs_type"] == fs_type
        if direct is not None:  # tmpfs has O_DIRECT since Linux 6.6
            assert entry["direct"] is direct
            assert "buffered I/O, because O_DIRECT does not work" in daemon.log
        assert (f"{fs_type}, which is memory" in daemon.log) is warned
        assert_kept(raw_client(daemon), 5 * MIB)

    def test_corruption(self, start_daemon: Start, raw_client: Connect) -> None:
        """A flipped bit on the device would become a wrong gradient."""
        daemon = start_daemon("--checksum", "full")
        client = raw_client(daemon)
        fill(client, 0, 4 * MIB)
        token = client.write(0, 0, 4 * MIB).checksum
        fd = os.open(f"/proc/self/fd/{client.files[0]}", os.O_RDWR)
        byte = os.pread(fd, 1, 3 * MIB + 5)
        os.pwrite(fd, bytes([byte[0] ^ 1]), 3 * MIB + 5)
        os.fsync(fd)
        os.close(fd)
        reply = client.read(0, 8 * MIB, 4 * MIB, token)
        assert (reply.kind, reply.errno) == ("corrupt", 0)
        assert str(daemon.scratch) in reply.text
        assert str(daemon.scratch) in daemon.log
        assert_kept(client, MIB)

    def test_failures_do_not_flood_the_log(self, daemon: Daemon, raw_client: Connect) -> None:
        """A failing device would fill the disk with the log about it."""
        client = raw_client(daemon)
        for _ in range(200):
            assert isinstance(client.read(1 << 40, 0, P), Failed)
        assert daemon.log.count("failed") < 5
