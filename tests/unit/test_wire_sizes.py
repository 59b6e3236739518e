"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discod.wire import PAGE_BYTES, align_up
from discod.wire.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("1kB", 1000),
        (" 2TiB ", 2 << 40),
        ("12B", 12),
    ],
)
def test_parse(text: str | int, size_bytes: int) -> None:
    """A size that a person may write would be another one, or none."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8X", "8GiBs", "-1", "1e9", "0", "0.1", 0, -1, "1.5.1GiB", True, "٣GiBx"]
)
def test_no_size(text: str | int) -> None:
    """A typing error would become a limit."""
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@given(st.integers(1, 1 << 60))
def test_round_trip(size_bytes: int) -> None:
    """A size that the daemon prints could not be given back to it."""
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.06, abs=1)


def test_format() -> None:
    """Sizes in messages would be unreadable."""
    assert [format_size(n) for n in (0, 512, 1536, 8 << 30, 5 << 40)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "8.0 GiB",
        "5.0 TiB",
    ]


@given(st.integers(0, 1 << 50))
def test_align_up(size_bytes: int) -> None:
    """A blob's slot would be too small, or not in whole pages."""
    aligned = align_up(size_bytes)
    assert aligned % PAGE_BYTES == 0
    assert size_bytes <= aligned < size_bytes + PAGE_BYTES
