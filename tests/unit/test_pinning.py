"""The pinned arena, over the fake driver: pieces, cuts, failures, and the end."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_client import pinning
from disco_client.arena import Arena
from disco_client.pinning import Pinning
from discod.cuda_driver import CudaError, Driver
from tests.helpers.fake_cuda import FakeCuda

MIB = 1 << 20
OUT_OF_MEMORY = 2


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake driver, for this process."""
    fake = FakeCuda(tmp_path)
    for name, value in fake.env().items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.fixture
def driver(fake: FakeCuda) -> Driver:
    """The fake, loaded."""
    return Driver(str(fake.library))


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """An arena of eight pieces of 2 MiB."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 2 * MIB)
    arena = Arena(16 * MIB)
    yield arena
    arena.close()


def registered(fake: FakeCuda) -> int:
    """Bytes that this process has registered."""
    return sum(fake.registered_bytes().values())


def test_only_what_is_backed_is_pinned(fake: FakeCuda, driver: Driver, arena: Arena) -> None:
    """Else attaching takes the whole arena's memory at once, or pins pages that are not there."""
    pinned = Pinning(arena, driver, 0)
    assert registered(fake) == 0
    arena.back(3 * MIB)
    list(pinned.parts(0, 3 * MIB))
    assert registered(fake) == pinned.pinned_bytes == arena.backed_bytes == 4 * MIB
    list(pinned.parts(MIB, 2 * MIB))
    assert registered(fake) == 4 * MIB


def test_what_was_read_beyond_what_is_backed_is_pinned(
    fake: FakeCuda, driver: Driver, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """Only saves back the arena, and a read may get a higher place than any save before it.

    Else nothing is registered, which fails, and the rest of the arena is never pinned.
    """
    pinned = Pinning(arena, driver, 0)
    arena.back(3 * MIB)
    assert list(pinned.parts(3 * MIB, 5 * MIB)) == [(3 * MIB, 4 * MIB), (4 * MIB, 5 * MIB)]
    assert not caplog.records
    arena.back(9 * MIB)
    list(pinned.parts(0, 9 * MIB))
    assert registered(fake) == pinned.pinned_bytes == 9 * MIB


def test_parts_are_cut_at_pieces_and_cover_the_range(
    driver: Driver, arena: Arena, fake: FakeCuda
) -> None:
    """Else a copy across two pieces fails with CUDA_ERROR_INVALID_VALUE, or bytes are left out."""
    pinned = Pinning(arena, driver, 0)
    arena.back(arena.size_bytes)
    parts = list(pinned.parts(MIB, 7 * MIB - 5))
    assert parts == [
        (MIB, 2 * MIB),
        (2 * MIB, 4 * MIB),
        (4 * MIB, 6 * MIB),
        (6 * MIB, 7 * MIB - 5),
    ]
    other = Arena(8 * MIB)
    other.back(8 * MIB)
    stream = 0
    with driver.on(0):
        for start, end in parts:
            driver.copy_async(other.address + start, arena.address + start, end - start, stream)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            driver.copy_async(other.address, arena.address + MIB, 2 * MIB, stream)
        driver.context_synchronize()
    other.close()


def test_a_failure_is_one_warning_and_pageable_copies(
    fake: FakeCuda, driver: Driver, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a memlock limit ends the training, or floods its log."""
    pinned = Pinning(arena, driver, 0)
    arena.back(arena.size_bytes)
    fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY, times=100, after=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parts = list(pinned.parts(MIB, 12 * MIB))
            assert parts == [(MIB, 2 * MIB), (2 * MIB, 4 * MIB), (4 * MIB, 12 * MIB)]
    assert pinned.pinned_bytes == 4 * MIB
    (record,) = caplog.records
    text = record.getMessage()
    assert "12.0 MiB of the arena's 16.0 MiB" in text
    assert "CUDA_ERROR_OUT_OF_MEMORY" in text
    assert "memlock" in text
    pinned.close()
    assert registered(fake) == 0


def test_closing_unpins_everything_and_pins_no_more(
    fake: FakeCuda, driver: Driver, arena: Arena
) -> None:
    """Else pages stay locked after close(), or the unmapped arena is registered for ever."""
    pinned = Pinning(arena, driver, 0)
    arena.back(8 * MIB)
    list(pinned.parts(0, 8 * MIB))
    assert registered(fake) == 8 * MIB
    pinned.close()
    assert registered(fake) == 0
    assert list(pinned.parts(0, 8 * MIB)) == [(0, 8 * MIB)]
    assert registered(fake) == 0
    pinned.close()
    assert fake.violations() == []


def test_progress_is_logged(
    driver: Driver, arena: Arena, caplog: pytest.LogCaptureFixture, fake: FakeCuda
) -> None:
    """Else the seconds that pinning a large arena takes look like a hang."""
    pinned = Pinning(arena, driver, 0)
    arena.back(arena.size_bytes)
    with caplog.at_level(logging.INFO, logger="disco_client.pinning"):
        list(pinned.parts(0, 16 * MIB))
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" of ")[0] for text in told] == [
        "pinned 2.0 MiB",
        "pinned 4.0 MiB",
        "pinned 8.0 MiB",
        "pinned 16.0 MiB",
    ]
    pinned.close()
