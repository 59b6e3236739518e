"""Requests out of bounds and memory that changes: the error is the sender's alone."""

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from discod.wire import PAGE_BYTES
from discod.wire.messages import (
    Cancel,
    CloseRing,
    CopyIn,
    CopyOut,
    Done,
    OpenRing,
    Ping,
    Promote,
    Read,
    Request,
    Trim,
    Write,
)
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import MIB, RawClient

Connect = Callable[..., RawClient]
P = PAGE_BYTES
TOP = (1 << 63) - 1

_F_ADD_SEALS = 1033
_F_SEAL_WRITE, _F_SEAL_FUTURE_WRITE = 0x8, 0x10
_PUNCH_HOLE_KEEP_SIZE = 0x3


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture
def client(daemon: Daemon, raw_client: Connect) -> Iterator[RawClient]:
    """The daemon must serve it and another one afterwards, and their data must be intact."""
    victim, client = raw_client(daemon), raw_client(daemon)
    victim.arena[:MIB] = data = os.urandom(MIB)
    token = victim.write(0, 0, MIB).checksum
    yield client
    assert isinstance(client.ask(Ping), Done)
    victim.arena[:MIB] = bytes(MIB)
    assert isinstance(victim.read(0, 0, MIB, token), Done)
    assert victim.arena[:MIB] == data


SIZE = 16 * MIB
CORNERS: list[dict[str, Any]] = [
    {"offset": TOP - P + 1, "length": P},
    {"offset": (1 << 62) - P, "length": 2 * P},
    {"offset": 0, "length": TOP - P + 1},
    {"offset": P, "length": TOP - P + 1},
    {"slot": TOP - P + 1, "length": P},
    {"slot": SIZE, "length": P},
    {"slot": SIZE - P, "length": 2 * P},
    {"slot": P, "length": TOP - P + 1},
    {"slot": P, "length": SIZE},
    {"slot": -1, "length": P},
    {"offset": -1, "length": P},
    {"length": 0},
    {"length": -1},
]


@pytest.mark.parametrize("verb", [Write, Read])
@pytest.mark.parametrize("corner", CORNERS, ids=str)
def test_io_out_of_bounds(client: RawClient, verb: type[Request], corner: dict[str, Any]) -> None:
    """A range that wraps around would reach another client's memory, or the daemon's."""
    fields = {"file": 0, "offset": 0, "slot": 0, "length": P} | corner
    if verb is Read:
        fields |= {"checksum": b"", "urgent": True}
    assert client.ask(verb, **fields).kind == "refused"


@pytest.mark.parametrize("file", [-1, 1, 255, TOP])
def test_files_that_are_none(client: RawClient, file: int) -> None:
    """Another client's file would be had by its number."""
    assert client.ask(Trim, file=file, size=0).kind == "refused"
    for verb, more in ((Write, {}), (Read, {"checksum": b"", "urgent": False})):
        reply = client.ask(verb, file=file, offset=0, slot=0, length=P, **more)
        assert reply.kind == "refused"


@pytest.mark.parametrize("size", [-1, 1, TOP, P - 1])
def test_trim_to_no_size(client: RawClient, size: int) -> None:
    """A file would be extended, or cut in the midst of a page."""
    assert client.ask(Trim, file=0, size=size).kind == "refused"


@pytest.mark.parametrize("verb", [CopyOut, CopyIn])
@pytest.mark.parametrize("ring", [-1, 0, 63, 64, TOP])
def test_rings_that_are_none(client: RawClient, verb: type[Request], ring: int) -> None:
    """A GPU's process would be told of memory that nobody gave it."""
    more = {"event": TOP} if verb is CopyOut else {}
    reply = client.ask(verb, ring=ring, offset=0, slot=0, length=1, **more)
    assert reply.kind == "refused"
    assert isinstance(client.ask(CloseRing, ring=ring), Done)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ring": -1},
        {"ring": 64},
        {"uuid": bytes(15)},
        {"handle": bytes(63)},
        {"events": (bytes(63),)},
        {"ring_bytes": 0},
        {"ring_bytes": -1},
        {"ring_bytes": TOP},
        {"ring_bytes": 1 << 47},
        {"ring_bytes": P - 1},
    ],
    ids=str,
)
def test_rings_that_cannot_be(client: RawClient, wrong: dict[str, Any]) -> None:
    """Sizes from the wire would reach a GPU's driver."""
    fields = {"ring": 0, "uuid": bytes(16), "handle": bytes(64), "ring_bytes": P, "events": ()}
    assert client.ask(OpenRing, **fields | wrong).kind == "refused"


@pytest.mark.parametrize("verb", [Cancel, Promote])
@pytest.mark.parametrize("target", [-1, 0, 1, TOP])
def test_targets_of_others(client: RawClient, verb: type[Request], target: int) -> None:
    """One client could cancel what another has asked for."""
    assert isinstance(client.ask(verb, target=target), Done)


def test_seq_used_again(client: RawClient) -> None:
    """Two jobs under one number: one of them would never be answered."""
    whole = {"file": 0, "offset": 0, "slot": 0, "length": SIZE}
    for _ in range(4):
        client.send(Write, **whole)
    seq = client.send(Write, **whole)
    client.send(Ping, seq=seq)
    client.send(Write, seq=seq, **whole)
    kinds = [getattr(client.next_answer(), "kind", "done") for _ in range(7)]
    assert sorted(kinds) in (["done"] * 6 + ["refused"], ["done"] * 7)
    assert isinstance(client.ask(Write, seq=seq, **whole), Done), "the number is free again"


def test_what_a_client_does_to_its_memfd(client: RawClient) -> None:
    """Memory that is pulled away kills the daemon with SIGBUS: the seals must hold."""
    fd = client.arena_fd
    for size in (0, SIZE - P, SIZE + P):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    client.arena[:MIB] = os.urandom(MIB)
    token = client.write(0, 0, MIB).checksum
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    for _ in range(20):
        writes = [
            client.send(Write, file=0, offset=4 * MIB, slot=0, length=8 * MIB) for _ in range(3)
        ]
        assert libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, 0, SIZE) == 0
        assert all(isinstance(client.answer(seq), Done) for seq in writes)
    assert isinstance(client.read(0, 0, MIB, token), Done), "into pages that are not there"
    with contextlib.suppress(OSError):  # EBUSY while it is mapped writable
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_WRITE)
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    assert isinstance(client.read(0, 0, MIB, token), Done)
    assert isinstance(client.write(0, 0, MIB), Done)


def test_messages_of_every_size(daemon: Daemon, raw_client: Connect) -> None:
    """Large messages would fill the daemon's memory, whoever sends them and however many."""
    for size in (32 << 10, (32 << 10) + 1, 60_000):
        client = raw_client(daemon)
        client.dealer.send(bytes(size))
        assert client.lifeline.recv(1) == b""
    eventually(lambda: daemon.log.count("broke the protocol") == 3)
    client = raw_client(daemon)
    assert isinstance(client.ask(Ping), Done)
    client.dealer.send(bytes(1 << 20))
    assert client.lifeline.recv(1) == b"", "libzmq has dropped the connection, and nobody says so"


def test_clients_of_one_rank(daemon: Daemon, raw_client: Connect) -> None:
    """Of two jobs with equal ranks ZeroMQ would serve the first alone, if ranks named its peers."""
    one, other = raw_client(daemon, rank=0), raw_client(daemon, rank=0)
    assert one.identity != other.identity
    for client in (one, other, one):
        assert isinstance(client.write(0, 0, MIB), Done)
    again = raw_client(daemon, rank=0)
    assert isinstance(again.ask(Ping), Done)
