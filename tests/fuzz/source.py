"""Values drawn from the bytes of a fuzzer: the same bytes give the same values, everywhere."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Source:
    """Hands out the bytes in order, and zeros after their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._data)

    def number(self, size_bytes: int = 1) -> int:
        """An unsigned integer of ``size_bytes``."""
        return int.from_bytes(self.take(size_bytes).ljust(size_bytes, b"\0"), "big")

    def take(self, count: int) -> bytes:
        """The next bytes: ``count``, or what is left."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def block(self) -> bytes:
        """Bytes after a length of one byte."""
        return self.take(self.number())

    def choose(self, values: Sequence[T]) -> T:
        """One of up to 256 values."""
        return values[self.number() % len(values)]
