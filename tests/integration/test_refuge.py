"""A scratch directory whose device fails, beside one that works: taken out of use, and back."""

import errno
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import disco_client
from discod.wire.messages import Done, Write
from tests.helpers import odd_daemon
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.faults import Rules
from tests.helpers.raw_client import MIB, RawClient
from tests.helpers.steps import SETTINGS, expected, step
from tests.integration.conftest import ClearError

Connect = Callable[..., RawClient]
Attach = Callable[..., None]


class Pair:
    """A daemon over directories ``one`` and ``two``, which probes ten times a second."""

    def __init__(self, path: Path, socket_dir: Path) -> None:
        self.path = path
        self.socket_dir = socket_dir
        self.rules = Rules(path / "rules")
        self.directories = [path / "one", path / "two"]
        for directory in self.directories:
            directory.mkdir()
        self.start()

    def start(self) -> None:
        """Start the daemon, or the next one."""
        self.daemon = Daemon(
            scratch=self.directories,
            socket_dir=self.socket_dir,
            log_path=self.path / "log",
            prefix=odd_daemon.prefix("probe=0.1"),
            env=self.rules.environment,
        )
        self.daemon.wait_until_ready()

    def in_use(self) -> list[bool]:
        """What the status says."""
        return [entry["in_use"] for entry in self.daemon.status()["scratch"]]

    def heal(self) -> None:
        """End all faults, and wait until the daemon has noticed."""
        self.rules.clear()
        eventually(lambda: all(self.in_use()), what="use of both directories again")


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    socket_dir = Path(tempfile.mkdtemp(prefix="discod-test-"))
    pair = Pair(tmp_path_factory.mktemp("pair"), socket_dir)
    yield pair
    pair.daemon.close()
    shutil.rmtree(socket_dir)


@pytest.fixture
def pair(shared_pair: Pair, raw_client: Connect) -> Iterator[Pair]:
    """Whole before the test, and after it."""
    yield shared_pair
    shared_pair.heal()


DEVICE_FAULTS = [
    ("pwritev EIO", "errno 5"),
    ("pwritev EROFS", "errno 30"),
    ("pwritev ENODEV", "errno 19"),
    ("pwritev ENXIO", "errno 6"),
    ("pwritev EUCLEAN", "errno 117"),
    ("pwritev ESTALE", "errno 116"),
    ("pwritev nothing", "0 of 1048576 bytes transferred"),
    ("fallocate EIO", "errno 5"),
]


def test_out_of_use_and_back(pair: Pair, raw_client: Connect) -> None:
    """All clients would try the broken device again and again, and nobody be told of it."""
    said_before = len(pair.daemon.log)
    client, other = raw_client(pair.daemon), raw_client(pair.daemon)
    client.arena[:MIB] = kept = os.urandom(MIB)
    token = client.write(0, 0, MIB).checksum
    for number, (fault, said) in enumerate(DEVICE_FAULTS, start=1):
        pair.rules.set(f"{fault} in=/one/")
        offset = number << 30  # beyond what is reserved, for fallocate
        failed = client.write(offset, 0, MIB)
        assert (failed.kind, "write of 1.0 MiB" in failed.text) == ("io", True), fault
        assert pair.in_use() == [False, True], fault
        one, two = pair.daemon.status()["scratch"]
        assert said in one["last_failure"]
        assert said not in two["last_failure"]
        refused = other.write(0, 0, MIB)
        assert (refused.kind, refused.errno) == ("out-of-use", 0), fault
        for part in (str(pair.directories[0]), said):
            assert part in refused.text
        assert isinstance(other.write(0, 0, MIB, file=1), Done)
        assert isinstance(client.read(0, 2 * MIB, MIB, token), Done), "what lies there is lost"
        assert client.arena[2 * MIB : 3 * MIB] == kept
        pair.heal()
        assert isinstance(other.write(0, 0, MIB), Done)
    log = pair.daemon.log[said_before:]
    assert log.count(f"{pair.directories[0]} is out of use") == len(DEVICE_FAULTS)
    assert log.count(f"{pair.directories[0]} works, and is in use again") == len(DEVICE_FAULTS)


def test_what_does_not_take_it_out_of_use(pair: Pair, raw_client: Connect) -> None:
    """A full disk, or what one client does, would take the directory from all the others."""
    client = raw_client(pair.daemon)
    for fault in ("ENOSPC", "EDQUOT", "EFBIG", "EINVAL", "ENOMEM", "short"):
        pair.rules.set(f"pwritev {fault} in=/one/", f"preadv {fault} in=/one/")
        for reply in (client.write(0, 0, MIB), client.read(0, 0, MIB)):
            assert isinstance(reply, Done) == (fault == "short")
        assert pair.in_use() == [True, True]
    for offset in (1 << 40, pair.daemon.status()["disk_used_bytes"]):
        failed = client.read(offset, 0, MIB)
        assert failed.kind == "io"
        assert f"read of 1.0 MiB at {offset}" in failed.text
        assert "past the end of its file: the file ends at" in failed.text
        for wrong in ("Input/output error", "kernel", "transferred"):
            assert wrong not in failed.text, "the device is not to blame"
    assert pair.in_use() == [True, True]


def test_a_corrupt_blob_does_not_take_it_out_of_use(pair: Pair, raw_client: Connect) -> None:
    """A client could take a directory from all the others with a wrong checksum."""
    client = raw_client(pair.daemon)
    token = client.write(0, 0, MIB).checksum
    client.arena[:MIB] = os.urandom(MIB)
    client.write(0, 0, MIB)
    assert client.read(0, 0, MIB, token).kind == "corrupt"
    assert pair.in_use() == [True, True]


def test_failing_reads(pair: Pair, raw_client: Connect) -> None:
    """A disk that loses data would be given more of it; or the message not say what failed."""
    client = raw_client(pair.daemon)
    client.write(0, 0, MIB)
    pair.rules.set("preadv EIO in=/one/")
    for _ in range(2):
        failed = client.read(0, 0, MIB)
        assert (failed.kind, failed.errno) == ("io", errno.EIO)
        for part in ("read of 1.0 MiB at 0", str(pair.directories[0]), "errno 5"):
            assert part in failed.text
    assert pair.in_use() == [False, True]
    pair.rules.clear()
    assert isinstance(client.read(0, 0, MIB), Done), "reads are tried, though it is out of use"


def test_what_is_queued_is_refused_too(pair: Pair, raw_client: Connect) -> None:
    """Each of a thousand queued writes would wait for the timeout of a dying disk."""
    client = raw_client(pair.daemon)
    client.write(0, 0, MIB)
    pair.rules.set("pwritev delay=1000 in=/one/")
    queued = [client.send(Write, file=0, offset=i * MIB, slot=0, length=MIB) for i in range(100)]
    eventually(lambda: pair.daemon.status()["clients"][0]["in_flight"] == 100)
    pair.rules.set("pwritev EIO delay=0.1 in=/one/")
    kinds = [getattr(client.answer(seq), "kind", "done") for seq in queued]
    threads = pair.daemon.status()["threads"]
    assert set(kinds) == {"done", "io", "out-of-use"}, "those in flight end as they would have"
    assert kinds.count("done") < threads * 8, "a chunk in each thread"
    assert kinds.count("io") < 2 * threads


def test_the_last_one_is_never_taken_out(pair: Pair, raw_client: Connect) -> None:
    """With all refused, nothing would be written that could be; or the status hide what fails."""
    client = raw_client(pair.daemon)
    pair.rules.set("pwritev EIO")
    assert client.write(0, 0, MIB, file=1).kind == "io"
    for _ in range(2):
        assert client.write(0, 0, MIB, file=0).kind == "io"
    assert client.write(0, 0, MIB, file=1).kind == "out-of-use"
    assert pair.in_use() == [True, False]
    for entry in pair.daemon.status()["scratch"]:
        assert "errno 5" in entry["last_failure"]


def test_a_client_that_has_no_other_file(pair: Pair, raw_client: Connect) -> None:
    """It would be told to write elsewhere, and has no elsewhere."""
    pair.rules.set("open EIO in=/two")
    client = raw_client(pair.daemon)
    assert len(client.files) == 1
    assert pair.in_use() == [True, False]
    pair.heal()
    pair.rules.set("pwritev EIO in=/one/ from=2")
    other = raw_client(pair.daemon)
    assert isinstance(other.write(0, 0, MIB), Done)
    assert other.write(0, 0, MIB).kind == "io"
    assert pair.in_use() == [False, True]
    assert other.write(0, 0, MIB).kind == "out-of-use"
    assert client.write(0, 0, MIB).kind == "io"
    pair.rules.clear()
    assert isinstance(client.write(0, 0, MIB), Done)


def test_clients_that_come_meanwhile(pair: Pair, raw_client: Connect) -> None:
    """They would be refused, or get a file on the broken device."""
    before = raw_client(pair.daemon)
    pair.rules.set("fallocate EIO in=/one/")
    assert before.write(0, 0, MIB).kind == "io"
    client = raw_client(pair.daemon)
    assert (len(before.files), len(client.files)) == (2, 1)
    client.arena[:MIB] = kept = os.urandom(MIB)
    token = client.write(0, 0, MIB).checksum

    def used() -> list[bool]:
        return [entry["used_bytes"] > 0 for entry in pair.daemon.status()["scratch"]]

    assert used() == [False, True]
    pair.heal()
    pair.daemon.kill()
    client.detach()
    before.close()
    pair.start()
    client.attach(pair.daemon.socket_dir)
    assert used() == [False, True], "the file counts for the wrong directory"
    assert isinstance(client.read(0, 2 * MIB, MIB, token), Done)
    assert client.arena[2 * MIB : 3 * MIB] == kept
    assert client.write(0, 0, MIB, file=1).kind == "refused"


@pytest.mark.parametrize("way", ["open EROFS in=/one/ nth=1", "open EIO in=/one/"])
def test_a_client_that_comes_back_meanwhile(pair: Pair, raw_client: Connect, way: str) -> None:
    """It would lose all of its blobs, also those on the disk that works."""
    client = raw_client(pair.daemon)
    client.arena[:MIB] = kept = os.urandom(MIB)
    tokens = [client.write(0, 0, MIB, file=file).checksum for file in (0, 1)]
    pair.daemon.kill()
    client.detach()
    pair.start()
    pair.rules.set(way)
    client.attach(pair.daemon.socket_dir)
    assert len(client.files) == 2
    read = client.read(0, 2 * MIB, MIB, tokens[0])
    if "nth" in way:
        assert isinstance(read, Done), "the file can still be opened for reading"
        assert client.arena[2 * MIB : 3 * MIB] == kept
    else:
        assert (read.kind, str(pair.directories[0]) in read.text) == ("io", True)
    assert client.write(0, 0, MIB).kind == "io"
    assert isinstance(client.read(0, 2 * MIB, MIB, tokens[1], file=1), Done)
    assert client.arena[2 * MIB : 3 * MIB] == kept
    assert pair.in_use() == [True, True], "one client's stale fd is no failure of the device"


def test_a_step_goes_on_over_the_other_disk(pair: Pair, attach_to: Attach) -> None:
    """A disk that fails in the middle of a step would cost the run, or some of its bits."""
    attach_to(pair.daemon, **SETTINGS)
    assert step(0) == expected(0)
    used = [entry["used_bytes"] for entry in pair.daemon.status()["scratch"]]
    assert all(used), "the step has not used both"
    pair.rules.set("pwritev EIO in=/one/ from=5")  # after some blobs of the step have gone there
    assert step(1) == expected(1)
    assert pair.in_use() == [False, True]
    before = pair.daemon.log.count(" failed: ")
    assert step(2) == expected(2)
    assert pair.daemon.log.count(" failed: ") == before, "the device was tried again"
    pair.heal()
    written = pair.daemon.status()["clients"][0]["written_bytes"]
    assert step(3) == expected(3)
    assert pair.daemon.status()["clients"][0]["written_bytes"] > written


def test_blobs_on_the_disk_that_fails(
    pair: Pair, attach_to: Attach, clear_error: ClearError
) -> None:
    """Reads would hang, or give something; the next step would fail too."""
    attach_to(pair.daemon, **SETTINGS)

    def lose() -> None:
        eventually(lambda: pair.daemon.status()["clients"][0]["in_flight"] == 0)
        pair.rules.set("preadv EIO in=/one/")

    with clear_error(disco_client.ScratchError, "EIO on read") as caught:
        step(0, after_forward=lose)
    for part in ("read of ", str(pair.directories[0]), "errno 5", "--scratch"):
        assert part in str(caught.value)
    assert pair.in_use() == [False, True]
    del caught
    gc.collect()
    assert disco_client.stats().live_blobs == 0
    assert step(1) == expected(1), "the other disk is well"


def test_status_table(pair: Pair, raw_client: Connect) -> None:
    """An operator would not see which disk is to be replaced, and why."""
    client = raw_client(pair.daemon)
    pair.rules.set("pwritev EIO in=/one/")
    client.write(0, 0, MIB)
    table = subprocess.run(
        [sys.executable, "-m", "discod", "status", "--socket-dir", pair.daemon.socket_dir],
        env=os.environ | {"COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (one,) = [line for line in table.splitlines() if "OUT OF USE" in line]
    assert str(pair.directories[0]) in one
    assert f"{pair.directories[0]}: last failure: write of 1.0 MiB at 0" in table
    assert "errno 5" in table
