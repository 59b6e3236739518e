"""The process's one attachment: made explicitly, or at first use from the environment."""

import atexit
import contextlib
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disco_client import environment, summary
from disco_client.cuda import cuda_over_ipc
from disco_client.devices.known import Devices
from disco_client.errors import DiscodError, UsageError
from disco_client.hooks import Packer
from disco_client.interrupts import Interrupts
from disco_client.opening import Ledger, Opening
from disco_client.session import Session
from disco_client.stats import Stats
from disco_client.store import Store
from disco_client.uninterrupted import Task

TRANSPORTS = ("auto", "shared-memory", "cuda-ipc")

DEFAULT_MIN_BYTES = 1 << 20
"""Smaller tensors are many and cost a request each, but little memory."""

ScratchDirs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class Connection:
    """What the process has while it is attached."""

    session: Session
    store: Store
    packer: Packer
    opening: Opening


_connection: Connection | None = None
_lock = threading.RLock()  # a signal handler may close() in the middle of connect()
_ledger = Ledger()
_interrupts = Interrupts()


def connect(
    socket_dir: str | os.PathLike[str] | None = None,
    *,
    scratch: ScratchDirs | None = None,
    arena: int | str | None = None,
    min_bytes: int | str | None = None,
    transport: str | None = None,
    keep_on_device: int | None = None,
    staging: int | str | None = None,
    reconnect_timeout: float = 60.0,
    reply_timeout: float = 60.0,
    start_timeout: float = 10.0,
) -> None:
    """Attach this process to the node's daemon.

    Without this call, the first use attaches with the defaults below.

    Args:
        socket_dir: The daemon's socket directory; default ``DISCOD_SOCKET_DIR``, else the
            daemon's own default.
        scratch: Start a daemon with these directories when none is running: one for the node,
            whichever rank comes first; it ends some seconds after its last client. Default
            ``DISCOD_SCRATCH`` (several separated by ``:``), else none is started.
        arena: This process's RAM tier, in bytes or as ``"8GiB"``. Default ``DISCOD_ARENA``, else
            the daemon's ``--ram`` divided by the job's processes on this node, as torchrun, MPI or
            Slurm give their number; without a launcher, half of what is left.
        min_bytes: Smaller tensors stay in memory. Default ``DISCOD_MIN_BYTES``, else 1 MiB.
        transport: How tensors get from a GPU to the arena. ``"shared-memory"``: this process copies
            them. ``"cuda-ipc"``: a process of the daemon's does, which needs the same pid and ipc
            namespaces and some 500 MB of each GPU's memory. ``"auto"``: the first. Default
            ``DISCOD_TRANSPORT``, else ``"auto"``.
        keep_on_device: How many of the newest saved tensors also stay on their GPU, since backward
            needs them first. Default ``DISCOD_KEEP_ON_DEVICE``, else 1, and 0 in a step after one
            in which the GPU's memory ran short.
        staging: Most bytes of a GPU's memory that copies off it may hold, and again so many for
            copies back to it; one tensor of any size always may. Default ``DISCOD_STAGING``, else
            1/32 of the GPU's memory, at most 1 GiB.
        reconnect_timeout: Seconds that a call may wait for a daemon that went away.
        reply_timeout: Seconds that a call may wait for a daemon that is there but does not answer.
        start_timeout: Seconds that a daemon started here may take to be ready.

    Raises:
        DaemonNotRunning: Nothing listens there, or the daemon that was started has ended.
        NoDescriptors: This process may not open as many fds as it takes.
        DaemonError: Another leaf says why the daemon will not serve this process.
        UsageError: Already attached.
        ValueError: A size, number, transport or timeout is malformed.
    """
    global _connection
    for name, seconds in (
        ("reconnect_timeout", reconnect_timeout),
        ("reply_timeout", reply_timeout),
        ("start_timeout", start_timeout),
    ):
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"{name}={seconds!r} must be a number of seconds, 0 or more")
    arena_bytes = environment.size("arena", arena)
    min_bytes = environment.size("min_bytes", min_bytes) or DEFAULT_MIN_BYTES
    over_ipc = environment.choice("transport", transport, TRANSPORTS) == "cuda-ipc"
    keep_on_device = environment.count("keep_on_device", keep_on_device)
    staging_bytes = environment.size("staging", staging)
    environment.warn_of_unknown_names()
    with _lock:
        if _connection is not None:
            raise UsageError(
                "this process is attached already (by connect(), or by its first use of discod), "
                "so these settings were not applied; call connect() before anything else, or "
                "close() first"
            )
        _close_leftovers()
        opening = Opening(
            _socket_dir(socket_dir),
            _scratch_dirs(scratch),
            arena_bytes,
            reconnect_timeout=reconnect_timeout,
            reply_timeout=reply_timeout,
            start_timeout=start_timeout,
        )
        _ledger.add(opening)
        try:
            _connection = _attach(
                opening,
                min_bytes,
                over_ipc=over_ipc,
                keep_on_device=keep_on_device,
                staging_bytes=staging_bytes,
            )
        except BaseException:
            _connection = None
            _interrupts.leave()
            _close_leftovers()
            raise
        _interrupts.watch()


def current() -> Connection:
    """The process's connection, made now if there is none. Raises as :func:`connect`."""
    connection = _connection
    if connection is None:
        with contextlib.suppress(UsageError):  # another thread was first
            connect()
        connection = _connection
        if connection is None:
            raise UsageError("close() was called while another thread was attaching")
    return connection


def stats() -> Stats:
    """What this process has offloaded; all zero before it is attached."""
    connection = _connection
    return Stats() if connection is None else connection.session.stats()


def close() -> None:
    """Detach; the daemon frees everything of this process at once. Idempotent.

    Blobs that are still held are lost. Tensors that were loaded stay valid.
    """
    global _connection
    with _lock:
        connection, _connection = _connection, None
    if connection is not None:
        try:
            with contextlib.suppress(DiscodError):  # the daemon is gone, or the session is torn
                summary.finish(connection.session.stats())
            connection.session.close()
        except BaseException:
            if not connection.session.detaching:  # by Ctrl-C: the next close() begins anew
                with _lock:
                    _connection = _connection or connection
            raise
    with _lock:
        if _connection is None:
            _interrupts.leave()
        _close_leftovers()


def _close_leftovers() -> None:
    """Close what the connection, if there is one, does not use; ``_lock`` is held."""
    connection = _connection
    _ledger.close_all_but(None if connection is None else connection.opening)


def _attach(
    opening: Opening,
    min_bytes: int,
    *,
    over_ipc: bool,
    keep_on_device: int | None,
    staging_bytes: int | None,
) -> Connection:
    arena, link = opening.open()
    devices = Devices(arena, staging_bytes)
    session = Session(arena, link, devices, keep_on_device)
    if over_ipc:
        limit = devices.limit_bytes
        devices.make("cuda", lambda unit: cuda_over_ipc(session, arena, unit, limit))
    store = Store(session, devices)
    opening.session = session
    return Connection(session, store, Packer(store, min_bytes), opening)


def _socket_dir(socket_dir: str | os.PathLike[str] | None) -> Path:
    return Path(os.path.abspath(environment.socket_dir() if socket_dir is None else socket_dir))


def _scratch_dirs(scratch: ScratchDirs | None) -> list[Path]:
    if scratch is None:
        return environment.scratch_dirs()
    if isinstance(scratch, str | os.PathLike):
        return [Path(scratch)]
    return [Path(part) for part in scratch]


def _after_fork_in_child() -> None:
    """The attachment is the parent's: the child has none, and makes its own at first use."""
    global _connection, _lock
    _connection = None
    _lock = threading.RLock()
    Task.after_fork()
    _ledger.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(close)
