"""A disk that is slow: callers wait for it and for nothing else, and nobody calls it a failure."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import disco_client
from disco_client import keep_up, pace
from discod.wire.messages import Done, Ping, Read
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.faults import Rules
from tests.helpers.raw_client import MIB, RawClient
from tests.helpers.steps import SETTINGS, expected, step

Start = Callable[..., Daemon]


@pytest.fixture
def rules(tmp_path: Path) -> Iterator[Rules]:
    rules = Rules(tmp_path / "rules")
    yield rules
    rules.clear()  # ends delays, so that the daemon can end


def test_writes_that_take_long(
    start_daemon: Start, attach_to: Callable[..., None], rules: Rules
) -> None:
    """Saves would pile up in memory without end, or raise although the disk makes progress."""
    # With longer chunks several would be one write.
    daemon = start_daemon("--chunk", "1MiB", env=rules.environment)
    attach_to(daemon, arena="4MiB", min_bytes="4KiB", reply_timeout=0.5)
    manager = disco_client.DiskOffloadManager(save_workers=2)
    rules.set("pwritev delay=0.1")
    tensors = [torch.full((1 << 18,), float(number)) for number in range(24)]
    began = time.monotonic()
    handles = [manager.save_tensor(tensor) for tensor in tensors]
    stats = disco_client.stats()
    # 20 of them at 10 a thread and second, by the daemon's three threads for writes.
    assert time.monotonic() - began > 0.5, "the disk was not waited for"
    assert stats.save_wait_seconds > 0.5
    assert stats.arena_bytes == 4 * MIB
    rules.clear()
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)


def test_a_trainer_is_told_once_that_its_disk_does_not_keep_up(
    start_daemon: Start,
    attach_to: Callable[..., None],
    rules: Rules,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody would know why the steps are slow; or normal runs would be called slow."""
    monkeypatch.setattr(pace, "_said", False)
    for name, value in (("COLD_CYCLES", 1), ("PART", 0.01), ("CYCLES", 2), ("LEAST_SECONDS", 0.1)):
        monkeypatch.setattr(keep_up, name, value)
    attach_to(start_daemon(env=rules.environment), **SETTINGS)
    rules.set("pwritev delay=0.05")
    lines = []
    for _ in range(4):
        assert step(0) == expected(0)
        lines += [r.getMessage() for r in caplog.records if "keep up" in r.getMessage()]
        caplog.clear()
    (line,) = lines
    assert "instead of 2.0 MiB would remove the wait" in line


def test_a_read_that_hangs_holds_up_nobody_else(
    start_daemon: Start, raw_client: Callable[..., RawClient], rules: Rules
) -> None:
    """One slow read on the event loop would stop the answers to every client of the node."""
    daemon = start_daemon(env=rules.environment)
    stuck, other = raw_client(daemon), raw_client(daemon)
    token = stuck.write(0, 0, MIB).checksum
    mine = other.write(0, 0, MIB).checksum
    rules.set("preadv delay=60 nth=1")
    seq = stuck.send(Read, file=0, offset=0, slot=0, length=MIB, checksum=token, urgent=True)
    eventually(lambda: any(client["in_flight"] for client in daemon.status()["clients"]))
    took = []
    for _ in range(200):
        began = time.monotonic()
        assert isinstance(other.ask(Ping), Done)
        took.append(time.monotonic() - began)
        assert isinstance(other.read(0, 0, MIB, mine), Done)
        assert isinstance(other.write(0, 0, MIB), Done)
    print(
        f"pings beside it: median {sorted(took)[100] * 1e3:.1f} ms, most {max(took) * 1e3:.0f} ms"
    )
    assert max(took) < 5
    assert any(client["in_flight"] for client in daemon.status()["clients"]), "it still hangs"
    rules.clear()
    assert isinstance(stuck.answer(seq), Done)
