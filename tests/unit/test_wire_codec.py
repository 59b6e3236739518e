"""The codec: what it encodes it decodes, and what breaks the protocol is a WireError."""

import dataclasses
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from discod.wire.codec import (
    MAX_BYTES_FIELD,
    MAX_LIST_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_RECORDS_BYTES,
    MAX_TEXT_CHARS,
    WireError,
    decode,
    encode,
)
from discod.wire.messages import (
    VERBS,
    Attach,
    Failed,
    Message,
    OpenRing,
    Ping,
    Records,
    Report,
    StatusReply,
    TraceReply,
    Welcome,
    Write,
)

FIELDS = {
    int: st.integers(-1, 2**63 - 1),
    str: st.text(max_size=200),
    bytes: st.binary(max_size=MAX_BYTES_FIELD),
    Records: st.binary(max_size=500),
    bool: st.booleans(),
    tuple[int, ...]: st.lists(st.integers(-1, 2**63 - 1), max_size=10).map(tuple),
    tuple[str, ...]: st.lists(st.text(max_size=50), max_size=10).map(tuple),
    tuple[bytes, ...]: st.lists(st.binary(max_size=MAX_BYTES_FIELD), max_size=10).map(tuple),
}
MESSAGES = st.one_of(
    [
        st.builds(cls, **{name: FIELDS[kind] for name, kind in typing.get_type_hints(cls).items()})
        for cls in VERBS.values()
    ]
)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary(), inner),
    max_leaves=20,
)
OPEN_RING = OpenRing(1, 2, 0, bytes(16), bytes(64), 4096, (bytes(64),) * MAX_LIST_ITEMS)
TRACE = TraceReply(0, 1, Records(bytes(MAX_RECORDS_BYTES)), ("/nvme",), 1)
REPORT = Report(1, 2, *[0] * 10, spans=(0, 1, 2))
WRITE = Write(seq=1, epoch=2, file=0, offset=0, slot=0, length=4096)


def packed(message: Message, **changes: Any) -> bytes:
    """``message`` on the wire, with entries of its map changed or, with ..., left out."""
    body = msgpack.unpackb(encode(message)) | changes
    data: bytes = msgpack.packb({key: value for key, value in body.items() if value is not ...})
    return data


@given(MESSAGES)
def test_round_trip(message: Message) -> None:
    """A message would arrive as another one."""
    assert decode(encode(message), type(message)) == message


@given(st.binary(max_size=300) | ANYTHING.map(msgpack.packb))
def test_garbage_is_a_wire_error(data: bytes) -> None:
    """Bytes from a broken or hostile peer would raise something that nobody catches."""
    with pytest.raises(WireError):
        decode(data, *VERBS.values())


@given(MESSAGES, st.data())
def test_a_changed_field_is_checked(message: Message, data: st.DataObject) -> None:
    """A field of any type and size would get through to code that trusts it."""
    names = [field.name for field in dataclasses.fields(message)]
    changed = data.draw(st.dictionaries(st.sampled_from([*names, "verb", "more"]), ANYTHING))
    try:
        decoded = decode(packed(message, **changed), *VERBS.values())
    except WireError:
        return
    assert decode(encode(decoded), type(decoded)) == decoded


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (WRITE, {"verb": 99}),
        (WRITE, {"verb": True}),
        (WRITE, {"verb": "16"}),
        (WRITE, {"verb": ...}),
        (WRITE, {"length": ...}),
        (WRITE, {"more": 1}),
        (WRITE, {"length": 1.5}),
        (WRITE, {"length": True}),
        (WRITE, {"length": None}),
        (WRITE, {"length": 2**63}),
        (WRITE, {"offset": -2}),
        (Attach(4096, 0, "x", False), {"resume": 1}),
        (Attach(4096, 0, "x", False), {"command": b"x"}),
        (Attach(4096, 0, "x", False), {"command": "x" * (MAX_TEXT_CHARS + 1)}),
        (Failed(1, 1, "io", 5, ""), {"kind": 5}),
        (Welcome(1, "", 1, 1, 1, 1, 1, ()), {"directories": "abc"}),
        (Welcome(1, "", 1, 1, 1, 1, 1, ()), {"directories": [1]}),
        (Welcome(1, "", 1, 1, 1, 1, 1, ()), {"directories": ["x"] * (MAX_LIST_ITEMS + 1)}),
        (TRACE, {"records": "x"}),
        (TRACE, {"records": b"x" * (MAX_RECORDS_BYTES + 1)}),
        (OPEN_RING, {"events": b"x"}),
        (OPEN_RING, {"events": ["x"]}),
        (OPEN_RING, {"events": [b"x" * (MAX_BYTES_FIELD + 1)]}),
        (OPEN_RING, {"events": [b"x"] * (MAX_LIST_ITEMS + 1)}),
        (REPORT, {"spans": [0, 1.5, 2]}),
        (REPORT, {"spans": [0] * (MAX_LIST_ITEMS + 1)}),
    ],
)
def test_what_breaks_the_protocol(message: Message, changes: dict[str, Any]) -> None:
    """A verb, a set of fields, a type or a limit would not be checked."""
    with pytest.raises(WireError):
        decode(packed(message, **changes), *VERBS.values())


def test_only_expected_verbs() -> None:
    """A peer could answer a question with a message of another conversation."""
    with pytest.raises(WireError, match="Ping came where Write was expected"):
        decode(encode(Ping(1, 1)), Write)


@pytest.mark.parametrize("data", [b"\xc1", b"", b"\x91" * 5000, b"\xd6\xff\x00\x00\x00\x01"])
def test_not_msgpack(data: bytes) -> None:
    """Reserved bytes, nothing, deep nesting or a timestamp would raise something else."""
    with pytest.raises(WireError):
        decode(data, Ping)


def test_size_limit_in_both_directions() -> None:
    """A message could be larger than a packet that always gets through."""
    with pytest.raises(WireError, match="is over"):
        encode(StatusReply("\N{SNOWMAN}" * MAX_TEXT_CHARS))
    with pytest.raises(WireError, match="is over"):
        decode(bytes(MAX_MESSAGE_BYTES + 1), Ping)


def test_verb_ids_never_change() -> None:
    """A daemon and a client of two releases would take one verb for another."""
    assert {verb: cls.__name__ for verb, cls in VERBS.items()} == {
        1: "Hello",
        2: "Welcome",
        3: "Attach",
        4: "Attached",
        5: "Refused",
        6: "StatusRequest",
        7: "StatusReply",
        8: "Detach",
        9: "GiveUp",
        10: "TraceRequest",
        11: "TraceReply",
        16: "Write",
        17: "Read",
        18: "Promote",
        19: "Cancel",
        20: "Trim",
        21: "Ping",
        22: "OpenRing",
        23: "CloseRing",
        24: "CopyOut",
        25: "CopyIn",
        26: "Report",
        32: "Done",
        33: "Failed",
    }
