"""Disks that lie: files are changed under a real daemon; each mode catches what it promises."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import disco_client
from discod.status_table import show
from discod.wire.messages import Done, Failed, Failure
from tests.helpers.daemon import Daemon
from tests.helpers.faults import Rules
from tests.helpers.raw_client import MIB, RawClient

PAGE = 4096
BLOB_BYTES = 16 * MIB
CHUNK_BYTES = 4 * MIB
MODES = ("off", "sampled", "full")


class Fault(NamedTuple):
    """A fault of a disk.

    Attributes:
        harm: Gets the file, its old content, and that which was written; changes the file.
        caught: By which modes.
    """

    name: str
    harm: Callable[[int, bytes, bytes], None]
    caught: tuple[str, ...]


def flip(offset: int) -> Callable[[int, bytes, bytes], None]:
    """One bit."""
    return lambda fd, old, new: put(fd, offset, bytes([new[offset] ^ 1]))


def put(fd: int, offset: int, data: bytes) -> None:
    assert os.pwrite(fd, data, offset) == len(data)


def chunk_lost(number: int) -> Callable[[int, bytes, bytes], None]:
    """One write of a chunk never reached the disk."""
    start, end = number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
    return lambda fd, old, new: put(fd, start, old[start:end])


FAULTS = [
    Fault("nothing", lambda fd, old, new: None, ()),
    Fault("a bit flipped in the first page", flip(17), ("sampled", "full")),
    Fault("a bit flipped in the last page", flip(BLOB_BYTES - 1), ("sampled", "full")),
    Fault("a bit flipped at the start of a MiB", flip(3 * MIB), ("sampled", "full")),
    # The limit of sampling, which the documents state.
    Fault("a bit flipped between two samples", flip(3 * MIB + 2 * PAGE), ("full",)),
    Fault("all of it is what was there before", lambda fd, old, new: put(fd, 0, old), MODES[1:]),
    Fault(
        "torn: the second half is what was there before",
        lambda fd, old, new: put(fd, len(new) // 2, old[len(old) // 2 :]),
        MODES[1:],
    ),
    Fault(
        "torn: the last page alone",
        lambda fd, old, new: put(fd, len(new) - PAGE, old[-PAGE:]),
        MODES[1:],
    ),
    Fault("the first chunk was dropped", chunk_lost(0), MODES[1:]),
    Fault("a chunk in the middle was dropped", chunk_lost(2), MODES[1:]),
    Fault("the last chunk was dropped", chunk_lost(3), MODES[1:]),
    Fault(
        "a page between two samples was dropped",
        lambda fd, old, new: put(fd, MIB + 5 * PAGE, old[MIB + 5 * PAGE :][:PAGE]),
        ("full",),
    ),
    Fault("misdirected by a page", lambda fd, old, new: put(fd, PAGE, new[:-PAGE]), MODES[1:]),
    Fault(
        "two chunks in each other's place",
        lambda fd, old, new: put(fd, 0, new[CHUNK_BYTES : 2 * CHUNK_BYTES] + new[:CHUNK_BYTES]),
        MODES[1:],
    ),
    Fault("zeros", lambda fd, old, new: put(fd, 0, bytes(len(new))), MODES[1:]),
    # That it ends too early is seen without any checksum.
    Fault("truncated", lambda fd, old, new: os.ftruncate(fd, len(new) // 2), MODES),
]


def nameless_files(daemon: Daemon) -> list[int]:
    """The scratch files that the daemon has open, opened once more for writing."""
    folder = Path(f"/proc/{daemon.pid}/fd")
    names = [name for name in os.listdir(folder) if is_scratch(folder / name, daemon.scratch)]
    return [os.open(folder / name, os.O_RDWR) for name in names]


def is_scratch(link: Path, scratch: Path) -> bool:
    target = os.readlink(link)
    return target.startswith(f"{scratch}/") and target.endswith(" (deleted)")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checking(start_daemon: Callable[..., Daemon], mode: str) -> Daemon:
    """A daemon with that mode."""
    return start_daemon("--checksum", mode, "--chunk", str(CHUNK_BYTES))


def test_what_is_caught(checking: Daemon, mode: str, raw_client: Callable[..., RawClient]) -> None:
    """A mode would promise what it does not hold: wrong gradients in silence."""
    client = raw_client(checking, 2 * BLOB_BYTES)
    old, new = os.urandom(BLOB_BYTES), os.urandom(BLOB_BYTES)
    client.arena[:BLOB_BYTES], client.arena[BLOB_BYTES:] = old, new
    (fd,) = nameless_files(checking)
    for fault in FAULTS:
        assert isinstance(client.write(0, 0, BLOB_BYTES), Done)
        token = client.write(0, BLOB_BYTES, BLOB_BYTES).checksum
        fault.harm(fd, old, new)
        os.fsync(fd)
        answer = client.read(0, BLOB_BYTES, BLOB_BYTES, token)
        caught = isinstance(answer, Failed)
        assert caught == (mode in fault.caught), f"{fault.name}: {answer}"
        if caught and fault.name != "truncated":
            assert answer.kind == Failure.CORRUPT
            assert str(checking.scratch) in answer.text
        client.arena[BLOB_BYTES:] = new
        if fault.name == "truncated":
            os.truncate(fd, 512 * MIB)
    os.close(fd)
    assert isinstance(client.write(0, 0, MIB), Done), "the daemon lives on"


def test_the_mode_is_said(checking: Daemon, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody would know that nothing is verified."""
    status = checking.status()
    assert status["checksum"] == mode
    show(status)
    shown = capsys.readouterr().out
    assert f"checksums: {mode}:" in shown
    assert ("not verified" in shown) == (mode == "off")
    assert ("checksums are off" in checking.log) == (mode == "off")


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_a_training_raises_instead_of_being_wrong(
    checking: Daemon, mode: str, attach_to: Callable[..., None]
) -> None:
    """The step would go on with wrong gradients; or the next one fail too."""
    attach_to(checking, arena="4MiB", min_bytes="4KiB")
    layers = [torch.nn.Linear(256, 256) for _ in range(12)]

    def forward() -> torch.Tensor:
        hidden = torch.ones(1024, 256, requires_grad=True)
        for layer in layers:
            hidden = disco_client.checkpoint(layer, hidden)
        return hidden.sum()

    loss = forward()
    for fd in nameless_files(checking):
        # Pages that hold blobs: all else of the file is zeros.
        for start in range(0, min(os.fstat(fd).st_size, 32 * MIB), MIB):
            page = os.pread(fd, PAGE, start)
            put(fd, start, bytes(byte ^ 1 for byte in page))
        os.fsync(fd)
        os.close(fd)
    with pytest.raises(disco_client.errors.BlobCorrupted, match=rf"blob \d+.*{checking.scratch}"):
        loss.backward()
    del loss
    forward().backward()
    assert disco_client.stats().live_blobs == 0


def wait_for_all(manager: disco_client.DiskOffloadManager, handles: list[Any]) -> None:
    """Until each is saved."""
    for handle in handles:
        manager.wait_for_save(handle, 10)


@pytest.fixture
def rules(tmp_path: Path) -> Iterator[Rules]:
    return Rules(tmp_path / "rules")


def test_failing_writes_and_reads(
    start_daemon: Callable[..., Daemon], attach_to: Callable[..., None], rules: Any
) -> None:
    """A failed write would be taken for done, or take other blobs with it; a failed read hang."""
    daemon = start_daemon(env=rules.environment)
    attach_to(daemon, arena="2MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager(prefetch_size=0)
    rules.set("pwritev EIO")
    tensor = torch.full((1 << 17,), 7.0)
    handles = [manager.save_tensor(tensor) for _ in range(4)]
    said = rf"{daemon.scratch}.*errno {errno.EIO}"
    with pytest.raises(disco_client.errors.ScratchError, match=said):
        wait_for_all(manager, handles)
    for handle in handles:
        assert torch.equal(manager.load_tensor(handle), tensor), "its bytes are in RAM"
    rules.clear()
    manager.cleanup()
    tensors = [torch.full((1 << 17,), float(i)) for i in range(10)]
    handles = [manager.save_tensor(each) for each in tensors]
    wait_for_all(manager, handles)
    rules.set("preadv EIO")
    with pytest.raises(disco_client.errors.ScratchError, match=said):
        manager.load_tensor(handles[0])
    rules.set("preadv short\npwritev short")
    for handle, each in zip(handles[1:], tensors[1:], strict=True):
        assert torch.equal(manager.load_tensor(handle), each), "others are not affected"
    manager.cleanup()
    handle = manager.save_tensor(tensor)
    assert torch.equal(manager.load_tensor(handle), tensor)
    assert all(entry["in_use"] for entry in daemon.status()["scratch"]), "it is the only one"
