"""The status: what it says, how the daemon makes it, and how ``discod status`` asks for it."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from discod import __version__
from discod.admission import Device
from discod.asking import NoAnswer, conversation
from discod.budget import Budget
from discod.config import Config
from discod.tenant import Tenant
from discod.wire.codec import MAX_TEXT_CHARS
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import StatusReply, StatusRequest
from discod.writes import Writes

NoStatus = NoAnswer
"""There is no status to be had; the text says why."""


def make_status(
    config: Config,
    devices: Sequence[Device],
    ram: Budget,
    disk: Budget,
    writes: Writes,
    tenants: Iterable[Tenant],
    gpus: Sequence[Mapping[str, str | int]],
) -> str:
    """The status as JSON. With clients beyond the message's size left out, and counted."""
    clients = list(tenants)
    used_bytes = [0] * len(devices)
    for tenant in clients:
        for file in tenant.files:
            used_bytes[file.directory] += file.scratch.allocated_bytes
    status: dict[str, object] = {
        "pid": os.getpid(),
        "version": __version__,
        "checksum": config.checksum.value,
        "threads": config.threads,
        "chunk_bytes": config.chunk_bytes,
        "ram_bytes": ram.limit_bytes,
        "ram_used_bytes": ram.used_bytes,
        "disk_bytes": disk.limit_bytes,
        "disk_used_bytes": disk.used_bytes,
        **writes.status(),
        "scratch": [
            {
                "path": str(device.directory.path),
                "fs_type": device.directory.fs_type,
                "direct": device.directory.direct,
                "in_use": device.directory.health.in_use,
                "last_failure": device.directory.health.last_failure,
                "used_bytes": used,
                "free_bytes": device.directory.free_bytes(),
            }
            for device, used in zip(devices, used_bytes, strict=True)
        ],
        "gpus": gpus,
        "clients_left_out": 0,
        "clients": [_client(tenant, writes) for tenant in clients],
    }
    while len(text := json.dumps(status)) > MAX_TEXT_CHARS:
        clients = clients[: len(clients) // 2]
        status["clients_left_out"] = len(clients)
        status["clients"] = [_client(tenant, writes) for tenant in clients]
    return text


def _client(tenant: Tenant, writes: Writes) -> dict[str, int]:
    return {
        "pid": tenant.who.pid,
        "uid": tenant.who.uid,
        "rank": tenant.who.rank,
        "arena_bytes": tenant.arena_bytes,
        "disk_bytes": tenant.disk_bytes,
        "written_bytes": tenant.written_bytes,
        **writes.status_of(tenant),
        "read_bytes": tenant.read_bytes,
        "in_flight": tenant.in_flight,
    }


def fetch_status(socket_dir: Path) -> str:
    """Ask the daemon.

    Raises:
        NoAnswer: None listens there, or it does not answer.
        SocketPathTooLong: The socket's path is over the limit.
    """
    with conversation(socket_dir, "status") as (connection, _):
        send_message(connection, StatusRequest())
        return receive_message(connection, StatusReply)[0].json
