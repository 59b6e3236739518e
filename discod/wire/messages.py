"""Every message between client and daemon: one frozen dataclass each, and its verb id.

Two conversations exist. The *attach* conversation runs over the ``SOCK_SEQPACKET`` lifeline, one
packet a message, some with fds:

1. client: :class:`Hello`; daemon: :class:`Welcome`, or :class:`Refused` and close.
2. client: :class:`Attach` with the arena's memfd (and, to resume, its scratch fds);
   daemon: :class:`Attached` with one ``O_PATH`` fd per scratch file, or :class:`Refused` and close.
   There is a file in each directory, but for those that are out of use at that time.
3. The connection then stays open and silent: it is the lifeline.
4. client: :class:`Detach` and close, when it goes for good. A lifeline that closes without it,
   while its process lives, is that of a client that will resume.
5. client, if it goes for good after its lifeline has closed: on a new connection :class:`Hello` and
   :class:`GiveUp` with its scratch fds, and close. It awaits no answer, and gets none.

``discod status`` sends :class:`StatusRequest` in place of step 2 and gets :class:`StatusReply`.
``discod trace`` sends any number of :class:`TraceRequest`, and gets a :class:`TraceReply` to each.

The *I/O* conversation runs over ZeroMQ (DEALER to ROUTER): every :data:`Request` has a ``seq`` of
the client's and the daemon's ``epoch``, and gets exactly one :data:`Reply` with the same ``seq``.
All offsets and lengths are bytes and multiples of :data:`discod.wire.PAGE_BYTES`; only the lengths
of copies between ring and arena are a tensor's own.

A *ring* is device memory of the client's that the daemon copies from and to. What is sent about
rings may be sent again, also to the next daemon, after :class:`OpenRing`: each copy does the same
again. A ring may be freed, and its events destroyed, only after :class:`CloseRing` was answered.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType

IDENTITY_BYTES = 16

Records = NewType("Records", bytes)
"""Bytes of a larger size than those of other fields."""


class Failure(StrEnum):
    """Why a request failed (``Failed.kind``)."""

    CANCELLED = "cancelled"
    """Cancelled before it began; nothing was transferred."""
    DISK_FULL = "disk-full"
    """No space on the file system, or the daemon's ``--disk`` quota is used up."""
    OVER_BUDGET = "over-budget"
    """A write beyond the daemon's ``--write-budget``, which has no room for it for some time.
    Nothing was written; the same write may work later."""
    IO = "io"
    """The device answered with an error, or with less than was asked for."""
    OUT_OF_USE = "out-of-use"
    """A write to a directory that the daemon has taken out of use, while another of the client's
    files is in one that works. Nothing was written; the same write may work later."""
    CORRUPT = "corrupt"
    """What was read does not have the checksum that was taken when it was written."""
    REFUSED = "refused"
    """Out of bounds, an old epoch, or malformed: a fault of the sender."""
    GPU = "gpu"
    """The GPU, or the daemon's process for it, cannot do it: the client copies by itself."""


class WaitFor(IntEnum):
    """What a call of the client waited for (``Report.spans``). Append only."""

    ROOM = 0
    """A save, for room in the arena."""
    READ = 1
    """A load, for a read or for room to read into."""
    DEVICE = 2
    """A save, for earlier copies off a device."""


MAX_REPORT_SPANS = 64
"""In one report: what a trainer that waits at every save has in a second is told by its totals."""


# The attach conversation.


@dataclass(frozen=True, slots=True)
class Hello:
    """Client: the first packet; its form never changes, so that versions can be compared."""

    protocol: int
    version: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Daemon: who it is and what it has to give."""

    protocol: int
    version: str
    epoch: int
    pid: int
    ram_bytes: int
    ram_free_bytes: int
    disk_bytes: int
    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attach:
    """Client: attach with an arena; fds: the memfd, and to resume, each scratch file in order.

    ``rank`` is -1 outside distributed jobs. ``command`` is for people only.
    """

    arena_bytes: int
    rank: int
    command: str
    resume: bool


@dataclass(frozen=True, slots=True)
class Attached:
    """Daemon: the ZeroMQ identity to use; fds: ``O_PATH``, one per directory that is in use.

    Files are numbered from 0 in this order. None when the client resumes: it has them, and they
    keep their numbers.
    """

    identity: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """Daemon: the attach is refused; the connection closes. ``text`` has fact and remedy."""

    text: str


@dataclass(frozen=True, slots=True)
class Detach:
    """Client, on its lifeline: it will not come back, and what it has on disk is of no use."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Client, instead of attaching: it will not come back. fds: each scratch file that it had.

    For a client whose lifeline has closed, and whose files are kept until it resumes.
    """


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Client: ask for the daemon's status instead of attaching."""


@dataclass(frozen=True, slots=True)
class StatusReply:
    """Daemon: its status, as JSON text in the form that ``discod status --json`` prints."""

    json: str


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Client: ask for what was recorded, instead of attaching.

    ``ring``: 0 for the waits of clients, from 1 on for the I/O calls of a device. ``first``: from
    this record on, or from the oldest that is kept.
    """

    ring: int
    first: int


@dataclass(frozen=True, slots=True)
class TraceReply:
    """Daemon: some of the records, as :mod:`discod.recorder` packs them.

    ``first`` is the number of the first; ``end`` how many were ever recorded, so that a record
    with this number is yet to come. ``devices`` are named for people, in the order of their rings.
    ``realtime_ns`` is what to add to a time of ``CLOCK_MONOTONIC`` for one of ``CLOCK_REALTIME``.
    """

    first: int
    end: int
    records: Records
    devices: tuple[str, ...]
    realtime_ns: int


# The I/O conversation: requests.


@dataclass(frozen=True, slots=True)
class Write:
    """Write ``length`` bytes of the arena at ``slot`` to scratch file ``file`` at ``offset``."""

    seq: int
    epoch: int
    file: int
    offset: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read the extent back into the arena and verify ``checksum``, as :class:`Done` gave it.

    ``urgent``: a trainer is blocked on it; otherwise it is a prefetch.
    """

    seq: int
    epoch: int
    file: int
    offset: int
    slot: int
    length: int
    checksum: bytes
    urgent: bool


@dataclass(frozen=True, slots=True)
class Promote:
    """Make the queued prefetch ``target`` (a seq) urgent. Unknown targets are no error."""

    seq: int
    epoch: int
    target: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the request ``target`` (a seq) unless it has begun.

    ``target`` is still answered by itself: ``CANCELLED`` or its outcome. Unknown targets are no
    error.
    """

    seq: int
    epoch: int
    target: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Nothing at or above ``size`` in ``file`` is in use.

    The daemon gives the space back once the file has stayed idle for some seconds, so that
    steady training keeps its extents and an idle job holds no disk.
    """

    seq: int
    epoch: int
    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered at once by the event loop: shows that the daemon is not frozen."""

    seq: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Report:
    """What the client alone knows of itself, for people: nothing depends on it.

    It comes at the end of a cycle, and about once a second while the client saves, loads or waits.
    The numbers are totals since the client attached, to whichever daemon, so that one sent twice
    tells nothing new. Times are of CLOCK_MONOTONIC.

    Args:
        cycles: That have ended.
        saved_bytes, elided_bytes: Copied into the arena; of these, freed without a write.
        loads: That have ended.
        room_waits, read_waits, device_waits: Calls that waited, as :class:`WaitFor` has them, those
            included that still do.
        room_wait_ns, read_wait_ns, device_wait_ns: For so long altogether.
        spans: Waits that ended since the report before: three numbers each, the
            :class:`WaitFor`, the begin and the end. Only the last ``MAX_REPORT_SPANS`` of them.
            Sent twice only if the daemon or the connection is lost: then the same span is the
            same wait.
    """

    seq: int
    epoch: int
    cycles: int
    saved_bytes: int
    elided_bytes: int
    loads: int
    room_waits: int
    room_wait_ns: int
    read_waits: int
    read_wait_ns: int
    device_waits: int
    device_wait_ns: int
    spans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenRing:
    """Have the daemon open device memory of ``ring_bytes``, exported for other processes.

    ``ring`` is the client's number for it; ``uuid`` the GPU's, 16 bytes; ``handle`` and ``events``
    the 64-byte IPC handles of the memory and of interprocess events. Fails with ``GPU`` when the
    daemon cannot open them. Opening an open ring in the same way again changes nothing.
    """

    seq: int
    epoch: int
    ring: int
    uuid: bytes
    handle: bytes
    ring_bytes: int
    events: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CloseRing:
    """Close the ring after the copies sent before. Unknown rings are no error.

    Once it is answered nothing of the daemon's has the ring's memory or events open.
    """

    seq: int
    epoch: int
    ring: int


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy ``length`` bytes of the ring at ``offset`` into the arena at ``slot``.

    Not before the ring's event number ``event``, as it was last recorded, is done; it must not be
    recorded again before the answer.
    """

    seq: int
    epoch: int
    ring: int
    offset: int
    slot: int
    length: int
    event: int


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy ``length`` bytes of the arena at ``slot`` into the ring at ``offset``.

    Once it is answered, work that any stream is given from then on sees the bytes.
    """

    seq: int
    epoch: int
    ring: int
    offset: int
    slot: int
    length: int


# The I/O conversation: replies.


@dataclass(frozen=True, slots=True)
class Done:
    """The request succeeded. ``checksum``: of what was written, else empty."""

    seq: int
    epoch: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed. ``kind`` is a :class:`Failure`, ``errno`` 0 where there is none."""

    seq: int
    epoch: int
    kind: str
    errno: int
    text: str


RingRequest = OpenRing | CloseRing | CopyOut | CopyIn
Request = Write | Read | Promote | Cancel | Trim | Ping | Report | RingRequest
Reply = Done | Failed
Message = (
    (Hello | Welcome | Attach | Attached | Refused | Detach | GiveUp)
    | (StatusRequest | StatusReply | TraceRequest | TraceReply)
    | (Request | Reply)
)

VERBS: dict[int, type[Message]] = {
    1: Hello,
    2: Welcome,
    3: Attach,
    4: Attached,
    5: Refused,
    6: StatusRequest,
    7: StatusReply,
    8: Detach,
    9: GiveUp,
    10: TraceRequest,
    11: TraceReply,
    16: Write,
    17: Read,
    18: Promote,
    19: Cancel,
    20: Trim,
    21: Ping,
    22: OpenRing,
    23: CloseRing,
    24: CopyOut,
    25: CopyIn,
    26: Report,
    32: Done,
    33: Failed,
}
"""Verb ids; append only."""
