"""The codec under any bytes, and under maps that are nearly messages."""

import typing
from typing import Any

import msgpack

from discod.wire.codec import (
    MAX_BYTES_FIELD,
    MAX_LIST_ITEMS,
    MAX_RECORDS_BYTES,
    MAX_TEXT_CHARS,
    WireError,
    decode,
    encode,
)
from discod.wire.messages import VERBS, Records
from tests.fuzz.source import Source

CLASSES = tuple(VERBS.values())
HINTS = {cls: typing.get_type_hints(cls) for cls in CLASSES}
NAMES = sorted({name for hints in HINTS.values() for name in hints} | {"verb", "more", ""})

EDGES = (0, 1, -1, -2, 4095, 4096, 1 << 31, 1 << 32, (1 << 62), (1 << 63) - 1, 1 << 63, -(1 << 63))


def any_bytes(data: bytes) -> None:
    """Either the bytes are a message, the same after another round trip, or a ``WireError``."""
    check(data)


def near_messages(data: bytes) -> None:
    """As :func:`any_bytes`, for a message with any of its fields replaced, left out or added."""
    source = Source(data)
    cls = source.choose(CLASSES)
    body: dict[object, object] = {name: plain(kind, source) for name, kind in HINTS[cls].items()}
    body["verb"] = next(verb for verb, other in VERBS.items() if other is cls)
    for _ in range(source.number() % 4):
        name = source.choose(NAMES)
        if source.number() % 4:
            body[name] = anything(source, 3)
        else:
            body.pop(name, None)
    try:
        packed = msgpack.packb(body)
    except (OverflowError, ValueError):
        return
    check(packed)


def check(data: bytes) -> None:
    """The codec's promise about ``data``."""
    try:
        message = decode(data, *CLASSES)
    except WireError:
        return
    for name, kind in HINTS[type(message)].items():
        assert is_within(kind, getattr(message, name)), (message, name)
    assert decode(encode(message), type(message)) == message


def is_within(kind: Any, value: object) -> bool:
    """Whether a field is of its type and within the limits, told in another way than the
    codec's."""
    if kind is int:
        return type(value) is int and value in range(-1, 1 << 63)
    if kind is bool:
        return value is True or value is False
    if kind is str:
        return isinstance(value, str) and len(value) <= MAX_TEXT_CHARS
    if kind is bytes:
        return isinstance(value, bytes) and len(value) <= MAX_BYTES_FIELD
    if kind is Records:
        return isinstance(value, bytes) and len(value) <= MAX_RECORDS_BYTES
    item = typing.get_args(kind)[0]
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_LIST_ITEMS
        and all(is_within(item, part) for part in value)
    )


def plain(kind: Any, source: Source) -> object:
    """A value of the type."""
    if kind is int:
        return source.choose(EDGES[:2]) if source.number() % 8 else source.choose(EDGES)
    if kind is bool:
        return bool(source.number() % 2)
    if kind is str:
        return source.block().decode("latin-1")
    if kind in (bytes, Records):
        return source.block()
    item = typing.get_args(kind)[0]
    return [plain(item, source) for _ in range(source.number() % 5)]


def anything(source: Source, depth: int) -> object:
    """A value of any type that msgpack has."""
    match source.number() % (10 if depth else 8):
        case 0:
            return None
        case 1:
            return bool(source.number() % 2)
        case 2:
            return source.choose(EDGES)
        case 3:
            return source.number(8)
        case 4:
            return float(source.number(4))
        case 5:
            return source.block().decode("latin-1")
        case 6:
            return source.block() * (source.number() % 3)
        case 7:
            return msgpack.ExtType(source.number() % 128, source.block())
        case 8:
            return [anything(source, depth - 1) for _ in range(source.number() % 4)]
        case _:
            return {
                source.choose(NAMES): anything(source, depth - 1)
                for _ in range(source.number() % 4)
            }
