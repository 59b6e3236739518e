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
from discod.config import WriteRate
from discod.engine import Engine
from discod.gpus import Gpus
from discod.io import Io
from discod.loop import Loop, Timer
from discod.mapping import Mapping
from discod.scratch_file import ScratchFile
from discod.tenant import File, Tenant, Who
from discod.wire.messages import (
    MAX_REPORT_SPANS,
    Cancel,
    Done,
    Failed,
    Failure,
    Ping,
    Reply,
    Report,
    Write,
)
from discod.writes import Writes
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


def test_the_last_report_counts(held: Held) -> None:
    """``discod status`` would show what a client was an hour ago."""
    for cycles in (1, 2):
        held.tenant.handle(Report(cycles, EPOCH, cycles, *[0] * 9, spans=(1, 5, 7)))
    assert held.answers == [Done(1, EPOCH, b""), Done(2, EPOCH, b"")]
    assert held.tenant.report is not None
    assert held.tenant.report.cycles == 2


@pytest.mark.parametrize(
    ("totals", "spans"),
    [
        ([0] * 10, (1, 5)),
        ([0] * 10, (9, 5, 7)),
        ([0] * 10, (-1, 5, 7)),
        ([0] * 10, (1, 7, 5)),
        ([0] * 10, (1, -1, 5)),
        ([0] * 10, (1, 5, 7) * (MAX_REPORT_SPANS + 1)),
        ([0] * 9 + [-1], ()),
    ],
)
def test_a_report_that_is_none(held: Held, totals: list[int], spans: tuple[int, ...]) -> None:
    """Whoever shows the waits of clients would meet one that ends before it began."""
    held.tenant.handle(Report(1, EPOCH, *totals, spans=spans))
    [answer] = held.answers
    assert isinstance(answer, Failed)
    assert answer.kind == Failure.REFUSED
    assert held.tenant.report is None


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


def test_what_was_cancelled_before_it_began_wears_no_disk(held: Held) -> None:
    """Writes that were never made would use the budget up."""
    for seq in range(2):
        held.write(seq)
    eventually(lambda: held.begun == 1)
    held.tenant.handle(Cancel(9, EPOCH, target=1))
    assert [(reply.seq, type(reply)) for reply in held.answers] == [(1, Failed), (9, Done)]
    held.let_go()
    eventually(lambda: len(held.answers) == 3)
    assert held.tenant._writes.status()["written_bytes"] == PAGE


def test_a_write_that_the_budget_holds(held: Held) -> None:
    """It would be lost, answered twice, or written for a client that has cancelled it or gone."""
    now = 0.0
    timers = []

    def call_later(seconds: float, callback: Callable[[], None]) -> Timer:
        timers.append(Timer(callback))
        return timers[-1]

    held.let_go()
    held.tenant._writes = Writes(WriteRate(2 * PAGE, 3600.0), call_later, clock=lambda: now)
    held.write(0)
    held.write(1)
    eventually(lambda: len(held.answers) == 2)
    held.write(2)
    assert isinstance(held.answers[2], Failed)
    assert held.answers[2].kind == Failure.OVER_BUDGET
    now = 3599.0
    for seq in (3, 3, 4):
        held.write(seq)
    assert held.tenant.in_flight == 2
    assert [reply.seq for reply in held.answers[3:]] == [3], "the same number twice"
    held.tenant.handle(Cancel(9, EPOCH, target=3))
    assert [reply.seq for reply in held.answers[4:]] == [3, 9]
    now = 3700.0
    assert timers[-1].callback is not None
    timers[-1].callback()
    held.write(5)
    eventually(lambda: len(held.answers) == 8)
    assert {(reply.seq, type(reply)) for reply in held.answers[6:]} == {(4, Done), (5, Done)}
    now = 7299.0
    held.write(6)
    assert held.tenant.in_flight == 1
    held.tenant.close(lambda: None)
    assert held.tenant.in_flight == 0
    assert held.begun == 4


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
