"""The faults that other tests inject: without them working, those tests would prove nothing."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from discod import faults
from discod.exits import Exit, StartupError
from discod.faults import BadRule, Faults, parse
from discod.io import Io
from discod.wire import PAGE_BYTES

DATA = memoryview(bytes(range(256)) * (4 * PAGE_BYTES // 256))


def outcomes(call: Callable[[], int], times: int) -> list[int]:
    """What each call gave: its result, or the negated errno."""
    seen = []
    for _ in range(times):
        try:
            seen.append(call())
        except OSError as error:
            seen.append(-(error.errno or 0))
    return seen


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("pwritev EIO", [-errno.EIO] * 4),
        ("pwritev EIO nth=2", [len(DATA), -errno.EIO, len(DATA), len(DATA)]),
        ("pwritev ENOSPC from=3", [len(DATA), len(DATA), -errno.ENOSPC, -errno.ENOSPC]),
        ("pwritev EIO every=2", [len(DATA), -errno.EIO, len(DATA), -errno.EIO]),
        ("pwritev short nth=1", [len(DATA) // 2, len(DATA), len(DATA), len(DATA)]),
        ("pwritev nothing from=3", [len(DATA), len(DATA), 0, 0]),
        ("pwritev EIO in=blob", [-errno.EIO] * 4),
        ("pwritev EIO in=another", [len(DATA)] * 4),
        ("preadv EIO # another call", [len(DATA)] * 4),
    ],
)
def test_rules(tmp_path: Path, rule: str, wanted: list[int]) -> None:
    """A test of a fault would see another one, or none."""
    (tmp_path / "rules").write_text(f"# for a test\n{rule}\n\n")
    io = Faults(tmp_path / "rules").io()
    fd = io.open(tmp_path / "blob", os.O_RDWR | os.O_CREAT, 0o600)
    assert outcomes(lambda: io.pwritev(fd, [DATA], 0), 4) == wanted
    os.close(fd)


def test_opening_again_by_an_fd(tmp_path: Path) -> None:
    """A rule for a directory would miss the files in it that a client brings back."""
    (tmp_path / "rules").write_text("open EIO in=blob")
    io = Faults(tmp_path / "rules").io()
    fd = os.open(tmp_path / "blob", os.O_RDWR | os.O_CREAT, 0o600)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        io.open(f"/proc/self/fd/{fd}", os.O_RDONLY, 0)
    os.close(fd)


def test_every_call_can_fail(tmp_path: Path) -> None:
    """A rule for one of the calls would do nothing."""
    rules = tmp_path / "rules"
    rules.write_text("".join(f"{name} EIO\n" for name in Io.__slots__))
    io = Faults(rules).io()
    fd = os.open(tmp_path / "blob", os.O_RDWR | os.O_CREAT, 0o600)
    buffer = memoryview(bytearray(PAGE_BYTES))
    for call in (
        lambda: io.open(tmp_path / "blob", os.O_RDONLY, 0),
        lambda: io.fallocate(fd, 0, PAGE_BYTES),
        lambda: io.pwritev(fd, [buffer], 0),
        lambda: io.preadv(fd, [buffer], 0),
        lambda: io.write_back(fd, 0, PAGE_BYTES),
    ):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            call()
    os.close(fd)


def test_a_change_of_the_file_ends_delays_and_begins_anew(tmp_path: Path) -> None:
    """A running daemon could not be healed."""
    rules = tmp_path / "rules"
    rules.write_text("pwritev delay=1000 nth=1")
    io = Faults(rules).io()
    fd = os.open(tmp_path / "blob", os.O_RDWR | os.O_CREAT, 0o600)
    ended = threading.Event()

    def write() -> None:
        io.pwritev(fd, [DATA], 0)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not ended.wait(0.05)
    rules.write_text("pwritev EIO nth=2")
    assert ended.wait(10)
    writer.join()
    assert outcomes(lambda: io.pwritev(fd, [DATA], 0), 2) == [len(DATA), -errno.EIO]
    rules.write_text("pwritev nonsense")  # while someone is writing it, say
    assert outcomes(lambda: io.pwritev(fd, [DATA], 0), 1) == [len(DATA)]
    rules.write_text("pwritev EIO")
    assert outcomes(lambda: io.pwritev(fd, [DATA], 0), 1) == [-errno.EIO]
    rules.unlink()
    assert outcomes(lambda: io.pwritev(fd, [DATA], 0), 1) == [len(DATA)]
    os.close(fd)


@pytest.mark.parametrize(
    "line", ["pwritev", "write EIO", "pwritev EWRONG", "pwritev EIO nth=x", "pwritev delay=long"]
)
def test_what_is_no_rule(line: str) -> None:
    """A misspelt fault would be none, and its test pass."""
    with pytest.raises(BadRule, match=line.split()[0]):
        parse(line)


def test_off_when_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every daemon would pay for it; or one would start without the faults that it was given."""
    monkeypatch.delenv("DISCOD_FAULTS", raising=False)
    assert faults.from_environment() == Io()
    assert Io().pwritev is os.pwritev
    monkeypatch.setenv("DISCOD_FAULTS", str(tmp_path / "missing"))
    with pytest.raises(StartupError, match="missing") as caught:
        faults.from_environment()
    assert caught.value.code is Exit.FAULTS_UNUSABLE
