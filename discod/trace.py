"""What was recorded: how the daemon hands it out, and how ``discod trace`` asks for it."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from discod.admission import Device
from discod.asking import conversation
from discod.block_device import block_device
from discod.client_report import WaitSpan
from discod.recorder import (
    FIRST_RING_OF_CALLS,
    MOST_WAITS,
    RECORD_BYTES,
    RING_OF_WAITS,
    Kind,
    Record,
    Recorder,
    Source,
    unpack,
)
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import Records, TraceReply, TraceRequest, WaitFor

MOST_NAME_CHARS = 200
MOST_NAMES_CHARS = 6000
"""Of a device, and of all, so that they fit into a message beside the records in any script."""

_KINDS = {
    WaitFor.ROOM: Kind.ROOM_WAIT,
    WaitFor.READ: Kind.READ_WAIT,
    WaitFor.DEVICE: Kind.DEVICE_WAIT,
}

TIMEOUT_SECONDS = 10.0
"""Of each part; the machine may be busier when somebody wants a trace than otherwise."""


class Recorded:
    """What the daemon has recorded.

    Args:
        devices: Its scratch directories, whose engines record their calls.

    Attributes:
        waits: The clients' waits.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.waits = Recorder(MOST_WAITS)
        by_engine = {device.engine: device for device in devices}
        self._devices = tuple(by_engine.values())
        most = min(MOST_NAME_CHARS, MOST_NAMES_CHARS // len(self._devices))
        self._names = tuple(_name(one, devices)[:most] for one in self._devices)

    def waited(self, source: Source, spans: Sequence[WaitSpan]) -> None:
        """Keep what a client reports."""
        for span in spans:
            self.waits.wait(_KINDS[span.what], source, span.begin_ns, span.end_ns)

    def reply(self, request: TraceRequest) -> TraceReply:
        """The answer; nothing is in a ring that does not exist."""
        number = request.ring - FIRST_RING_OF_CALLS
        first, records, end = 0, b"", 0
        if request.ring == RING_OF_WAITS:
            first, records = self.waits.part(request.first)
            end = self.waits.end
        elif 0 <= number < len(self._devices):
            first, records, end = self._devices[number].engine.calls(request.first)
        return TraceReply(first, end, Records(records), self._names, _realtime_ns())


def _name(device: Device, devices: Sequence[Device]) -> str:
    paths = ", ".join(str(one.directory.path) for one in devices if one.engine is device.engine)
    found = block_device(device.directory.device)
    return f"{found.name}: {paths}" if found else paths


def _realtime_ns() -> int:
    """``CLOCK_REALTIME`` less ``CLOCK_MONOTONIC``, of the moment when both were read fastest."""
    tries = []
    for _ in range(3):
        before = time.monotonic_ns()
        now = time.time_ns()
        after = time.monotonic_ns()
        tries.append((after - before, now - (before + after) // 2))
    return min(tries)[1]


@dataclass(frozen=True, slots=True)
class Part:
    """One ring, as far as it is kept.

    Attributes:
        records: In the order in which they ended, but for those that ended nearly together.
        forgotten: How many there were before them.
    """

    records: list[Record]
    forgotten: int

    def since(self, began_ns: int) -> list[Record]:
        """Those that ended after this time of ``CLOCK_MONOTONIC``."""
        return [record for record in self.records if record.ended_ns >= began_ns]

    def reaches(self, began_ns: int) -> bool:
        """Whether none that ended after it is forgotten."""
        return not self.forgotten or not self.records or self.records[0].ended_ns < began_ns


@dataclass(frozen=True, slots=True)
class Trace:
    """What the command has got.

    Attributes:
        pid: The daemon's.
        devices: Their names, each with its calls.
        waits: Of the clients.
        realtime_ns: As in :class:`TraceReply`.
    """

    pid: int
    devices: tuple[tuple[str, Part], ...]
    waits: Part
    realtime_ns: int


def fetch_trace(socket_dir: Path) -> Trace:
    """Ask the daemon.

    Raises:
        NoAnswer: None listens there, or it does not answer.
        SocketPathTooLong: The socket's path is over the limit.
    """
    with conversation(socket_dir, "trace", TIMEOUT_SECONDS) as (connection, welcome):
        waits, reply = _ring(connection, RING_OF_WAITS)
        calls = [
            _ring(connection, FIRST_RING_OF_CALLS + number)[0]
            for number in range(len(reply.devices))
        ]
    devices = tuple(zip(reply.devices, calls, strict=True))
    return Trace(welcome.pid, devices, waits, reply.realtime_ns)


def _ring(connection: socket.socket, ring: int) -> tuple[Part, TraceReply]:
    """What was in it when this began, and the first answer."""
    reply = first = _ask(connection, ring, 0)
    records = list(unpack(reply.records))
    forgotten = reply.first
    while reply.first + len(reply.records) // RECORD_BYTES < first.end:
        reply = _ask(connection, ring, reply.first + len(reply.records) // RECORD_BYTES)
        if reply.first >= first.end:
            break
        if reply.first > forgotten + len(records):  # overwritten since the last answer
            forgotten, records = reply.first, []
        records += unpack(reply.records)
    return Part(records, forgotten), first


def _ask(connection: socket.socket, ring: int, first: int) -> TraceReply:
    send_message(connection, TraceRequest(ring, first))
    return receive_message(connection, TraceReply)[0]
