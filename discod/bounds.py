"""What requests must keep to, and the refusal of those that do not."""

from discod.wire import PAGE_BYTES


class Refusal(Exception):
    """The request breaks the rules; the text says which."""


def check_pages(**numbers: int) -> None:
    """Raise :class:`Refusal` unless all are in whole pages."""
    for name, number in numbers.items():
        if number % PAGE_BYTES:
            raise Refusal(f"{name} {number} is not in whole pages")


def check_range(start: int, length: int, size_bytes: int, what: str) -> None:
    """Raise :class:`Refusal` unless ``length`` bytes, at least one, at ``start`` are inside."""
    if length <= 0 or not 0 <= start <= size_bytes - length:
        raise Refusal(f"{length} bytes at {start} are not in {what} of {size_bytes}")
