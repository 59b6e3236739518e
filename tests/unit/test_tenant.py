"""A client's unanswered requests: their limit, and the end of the client in the midst of them."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from discod import tenant as tenant_module
from discod.budget import Budget
from discod.checksum import Mode
from discod.engine import Engine
from discod.gpus import Gpus
from discod.io import Io
from discod.loop import Loop
from discod.mapping import Mapping
from discod.scratch_file import ScratchFile
from discod.tenant import File, Tenant, Who
from discod.wire.messages import Done, Failed, Ping, Reply, Write
from tests.helpers.daemon import eventually
from tests.helpers.raw_client import make_arena

EPOCH = 7
PAGE = 4096


class Held:
    """A tenant of which no write ends before :meth:`let_go`."""

    def __init__(self, path: Path) -> None:
        self.answers: list[Reply] = []
        self.going = threading.Event()
        self.begun = 0
        arena = make_arena(16 * PAGE)
        self.engine = Engine(2, PAGE, post=self.post, io=Io(pwritev=self.pwritev))
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.quota = Budget(1 << 30)
        scratch = ScratchFile(fd, str(path), direct=True, quota=self.quota)
        self.tenant = Tenant(
            Who(os.getpid(), os.getuid(), -1),
            EPOCH,
            Mapping(arena, 16 * PAGE),
            [File(scratch, self.engine, 0)],
            Mode.SAMPLED,
            Gpus(Loop()),
            self.answers.append,
            lambda file: None,
        )
        os.close(arena)

    def post(self, *callbacks: Callable[[], None]) -> None:
        for callback in callbacks:
            callback()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.begun += 1
        assert self.going.wait(20)
        return os.pwritev(fd, buffers, offset)

    def write(self, seq: int) -> None:
        self.tenant.handle(Write(seq, EPOCH, 0, seq * PAGE, 0, PAGE))

    def let_go(self) -> None:
        self.going.set()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """The test fails when anything of the tenant is left."""
    held = Held(tmp_path / "file")
    yield held
    held.let_go()
    closed = threading.Event()
    if not held.tenant.closing:
        held.tenant.close(closed.set)
        assert closed.wait(10)
    held.tenant.free(discard=False)
    held.engine.stop()
    assert held.quota.used_bytes == 0


def test_too_many_unanswered(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client in a loop would fill the daemon's memory."""
    monkeypatch.setattr(tenant_module, "MAX_UNANSWERED", 4)
    for seq in range(6):
        held.write(seq)
    refused = list(held.answers)
    assert [(reply.seq, type(reply)) for reply in refused] == [(4, Failed), (5, Failed)]
    held.tenant.handle(Ping(99, EPOCH))
    assert held.answers[-1] == Done(99, EPOCH, b"")
    held.let_go()
    eventually(lambda: len(held.answers) == 7)
    held.write(100)
    eventually(lambda: held.answers[-1].seq == 100)
    assert isinstance(held.answers[-1], Done)


def test_close_waits_for_what_is_in_flight(held: Held) -> None:
    """The arena would be unmapped under a thread that reads it: the daemon would die."""
    for seq in range(5):
        held.write(seq)
    eventually(lambda: held.begun == 1)
    closed = threading.Event()
    held.tenant.close(closed.set)
    assert held.tenant.in_flight == 1
    assert not closed.is_set()
    held.let_go()
    assert closed.wait(10)
    assert held.begun == 1, "what was queued has been written for a client that is gone"
    assert held.answers == [], "answers went to a client that is gone"


def test_pages_of_the_mapping(tmp_path: Path) -> None:
    """The daemon would write other bytes than those that the client sees."""
    fd = make_arena(8 * PAGE)
    mapping = Mapping(fd, 8 * PAGE)
    with mmap.mmap(fd, 8 * PAGE) as arena:
        arena[PAGE : PAGE + 5] = b"hello"
        assert bytes(mapping.view(PAGE, 5)) == b"hello"
        mapping.view(7 * PAGE, PAGE)[:3] = b"bye"
        assert arena[7 * PAGE : 7 * PAGE + 3] == b"bye"
    os.close(fd)
    mapping.close()
    assert "discod-test" not in Path("/proc/self/maps").read_text()
