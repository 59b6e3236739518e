"""Messages to bytes and back: msgpack maps, with every type and size checked before use.

Never pickle, no extension types. A message is a map from field name to value with the verb's id
under ``"verb"``; unknown verbs, missing or extra fields, wrong types and values outside the limits
raise :class:`WireError`. Integers are in [-1, 2**63); between client and daemon, -1 exists for
``Attach.rank`` alone.

:func:`encode` and :func:`decode` are for the messages between client and daemon; :class:`Codec` is
for any family of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints, overload

import msgpack

from discod.wire.messages import VERBS, Message, Records

MAX_MESSAGE_BYTES = 1 << 17
"""128 KiB: below the default send buffer of a unix socket, so that any packet can be sent whole."""
MAX_TEXT_CHARS = 1 << 16
MAX_BYTES_FIELD = 64
MAX_RECORDS_BYTES = 96 << 10
MAX_LIST_ITEMS = 256

_MAX_INT = (1 << 63) - 1

M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)


class WireError(ValueError):
    """A message breaks the protocol; the text says how. The sender is at fault."""


def _check_int(value: object) -> bool:
    return type(value) is int and -1 <= value <= _MAX_INT


def _check_str(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT_CHARS


def _check_bytes(value: object) -> bool:
    return type(value) is bytes and len(value) <= MAX_BYTES_FIELD


def _check_records(value: object) -> bool:
    return type(value) is bytes and len(value) <= MAX_RECORDS_BYTES


def _check_bool(value: object) -> bool:
    return type(value) is bool


def _check_all(value: object, check: Callable[[object], bool]) -> bool:
    return type(value) is tuple and len(value) <= MAX_LIST_ITEMS and all(map(check, value))


_CHECKS: dict[Any, Callable[[object], bool]] = {
    int: _check_int,
    str: _check_str,
    bytes: _check_bytes,
    bool: _check_bool,
    Records: _check_records,
    tuple[int, ...]: lambda value: _check_all(value, _check_int),
    tuple[str, ...]: lambda value: _check_all(value, _check_str),
    tuple[bytes, ...]: lambda value: _check_all(value, _check_bytes),
}


def _wrong(cls: type[Any], name: str) -> WireError:
    return WireError(f"{cls.__name__}.{name} of a wrong type or outside its limits")


class Codec:
    """Encodes and decodes one family of messages.

    Args:
        verbs: The frozen dataclasses and their ids.
    """

    def __init__(self, verbs: Mapping[int, type[Any]]) -> None:
        self._verbs = verbs
        self._verb_ids = {cls: verb for verb, cls in verbs.items()}
        self._field_names = {cls: tuple(f.name for f in fields(cls)) for cls in verbs.values()}
        self._field_checks = {
            cls: {name: _CHECKS[kind] for name, kind in get_type_hints(cls).items()}
            for cls in verbs.values()
        }
        # Most fields are integers: a call for each would cost more than all the rest.
        self._ints = {
            cls: tuple(name for name, check in checks.items() if check is _check_int)
            for cls, checks in self._field_checks.items()
        }
        self._others = {
            cls: tuple((name, checks[name]) for name in checks if name not in self._ints[cls])
            for cls, checks in self._field_checks.items()
        }

    def encode(self, message: object) -> bytes:
        """The bytes of a message. Raises :class:`WireError` over ``MAX_MESSAGE_BYTES``."""
        cls = type(message)
        body: dict[str, object] = {name: getattr(message, name) for name in self._field_names[cls]}
        body["verb"] = self._verb_ids[cls]
        data: bytes = msgpack.packb(body)
        if len(data) > MAX_MESSAGE_BYTES:
            raise WireError(f"{cls.__name__} of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
        return data

    def decode(self, data: bytes | memoryview, expected: tuple[type[Any], ...]) -> Any:
        """The message in ``data``, one of the ``expected`` classes; raises :class:`WireError`."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise WireError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
        try:
            body = msgpack.unpackb(data, use_list=False, strict_map_key=True, timestamp=0)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise WireError(f"not a message: {error}") from None
        if type(body) is not dict:
            raise WireError(f"not a map but {type(body).__name__}")
        verb = body.pop("verb", None)
        cls = self._verbs.get(verb) if type(verb) is int else None
        if cls is None:
            raise WireError(f"unknown verb {verb!r:.40}")
        if cls not in expected:
            names = ", ".join(e.__name__ for e in expected)
            raise WireError(f"{cls.__name__} came where {names} was expected")
        if body.keys() != self._field_checks[cls].keys():
            raise WireError(f"{cls.__name__} with the wrong fields")
        for name in self._ints[cls]:
            value = body[name]
            if type(value) is not int or not -1 <= value <= _MAX_INT:
                raise _wrong(cls, name)
        for name, check in self._others[cls]:
            if not check(body[name]):
                raise _wrong(cls, name)
        return cls(**body)


_wire = Codec(VERBS)


def encode(message: Message) -> bytes:
    """The message's bytes. Raises :class:`WireError` when it is over ``MAX_MESSAGE_BYTES``."""
    return _wire.encode(message)


@overload
def decode(data: bytes | memoryview, one: type[M], /) -> M: ...
@overload
def decode(data: bytes | memoryview, one: type[M], other: type[N], /) -> M | N: ...
@overload
def decode(data: bytes | memoryview, /, *expected: type[Message]) -> Message: ...
def decode(data: bytes | memoryview, /, *expected: type[Any]) -> Any:
    """The message in ``data``, which must be one of the ``expected`` classes.

    Raises:
        WireError: Not msgpack, another verb, or a field that is missing, unknown, of another type
            or outside its limits.
    """
    return _wire.decode(data, expected)
