"""Checksums of blobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discod.checksum import SAMPLE_STEP_BYTES, Mode, matches, take, valid
from discod.wire import PAGE_BYTES

LENGTHS = [PAGE_BYTES, 3 * PAGE_BYTES, SAMPLE_STEP_BYTES, 5 * SAMPLE_STEP_BYTES + 3 * PAGE_BYTES]


def blob(length: int) -> bytearray:
    """Bytes in which every page differs."""
    return bytearray(b"".join(i.to_bytes(4, "big") for i in range(length // 4)))


def token_of(mode: Mode, data: bytearray) -> bytes:
    return take(mode, memoryview(data))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", [Mode.SAMPLED, Mode.FULL])
def test_same_bytes_match(mode: Mode, length: int) -> None:
    """Every read would be taken for corrupt."""
    token = token_of(mode, blob(length))
    assert len(token) == 9
    assert valid(token)
    assert matches(token, memoryview(blob(length)))


@given(st.integers(0, LENGTHS[1] * 8 - 1))
def test_full_sees_every_bit(bit: int) -> None:
    """A flipped bit would become a wrong gradient."""
    data = blob(LENGTHS[1])
    token = token_of(Mode.FULL, data)
    data[bit // 8] ^= 1 << bit % 8
    assert not matches(token, memoryview(data))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("where", ["first page", "last page", "each MiB", "a chunk", "shifted"])
def test_sampled_sees_stale_and_misdirected_pages(length: int, where: str) -> None:
    """A lost end, a stale chunk or a blob read from elsewhere would go unseen."""
    data = blob(length)
    token = token_of(Mode.SAMPLED, data)
    match where:
        case "first page":
            data[0] ^= 1
        case "last page":
            data[-1] ^= 1
        case "each MiB":
            data[(length - 1) // SAMPLE_STEP_BYTES * SAMPLE_STEP_BYTES] ^= 1
        case "a chunk":
            end = length // PAGE_BYTES // 2 * PAGE_BYTES + PAGE_BYTES
            data[:end] = bytes(end)
        case "shifted":
            data = data[PAGE_BYTES:] + b"\xff" * PAGE_BYTES
    assert not matches(token, memoryview(data))


def test_a_token_is_verified_by_its_own_kind() -> None:
    """After a restart with another --checksum every read would be taken for corrupt."""
    data = blob(LENGTHS[1])
    sampled, full = token_of(Mode.SAMPLED, data), token_of(Mode.FULL, data)
    data[PAGE_BYTES] ^= 1  # in no sample
    assert matches(sampled, memoryview(data))
    assert not matches(full, memoryview(data))


def test_off_takes_and_verifies_nothing() -> None:
    """Off would cost time, or refuse what was written without a checksum."""
    assert token_of(Mode.OFF, blob(PAGE_BYTES)) == b""
    assert valid(b"")
    assert matches(b"", memoryview(bytes(PAGE_BYTES)))


@pytest.mark.parametrize("token", [b"\x01", b"\x00" + bytes(8), b"\x03" + bytes(8), bytes(10)])
def test_tokens_of_another_make(token: bytes) -> None:
    """A token that cannot be verified would fail in the middle of a read."""
    assert not valid(token)
