"""The status: what it says, how the daemon makes it, and how ``discod status`` asks for it.

Its keys are described in ``docs/status.md``, which a test holds to it. They are an interface: more
may come, none goes or changes.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discod import __version__
from discod.admission import Device
from discod.asking import NoAnswer, conversation
from discod.budget import Budget
from discod.client_report import wait_seconds, waits
from discod.config import Config
from discod.tenant import Tenant, Who
from discod.traffic import Traffic
from discod.wire.codec import MAX_TEXT_CHARS
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import StatusReply, StatusRequest, WaitFor
from discod.writes import Writes

NoStatus = NoAnswer
"""There is no status to be had; the text says why."""

COMMAND_CHARS = 80

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The daemon at one moment.

    Attributes:
        status: All of it, no client left out.
        ranks: Of each rank its totals, as :meth:`discod.ranks.Ranks.totals`.
        rank_names: Of the clients in ``status``, in its order, which of ``ranks`` they count for.
    """

    status: Status
    ranks: Mapping[str, Counter[str]]
    rank_names: Sequence[str]

    def clients_of(self, rank: str) -> list[Status]:
        """The clients of ``status`` that count for a rank."""
        clients = zip(self.rank_names, self.status["clients"], strict=True)
        return [client for name, client in clients if name == rank]


def make_status(
    config: Config,
    devices: Sequence[Device],
    ram: Budget,
    disk: Budget,
    writes: Writes,
    tenants: Iterable[Tenant],
    gpus: Sequence[Mapping[str, str | int]],
    up_seconds: float,
    metrics: str | None,
) -> Status:
    """The status, with all clients."""
    now = time.monotonic()
    clients = list(tenants)
    used_bytes = [0] * len(devices)
    for tenant in clients:
        for file in tenant.files:
            used_bytes[file.directory] += file.scratch.allocated_bytes
    return {
        "pid": os.getpid(),
        "version": __version__,
        "up_seconds": round(up_seconds, 3),
        "metrics": metrics,
        "checksum": config.checksum.value,
        "threads": config.threads,
        "chunk_bytes": config.chunk_bytes,
        "ram_bytes": ram.limit_bytes,
        "ram_used_bytes": ram.used_bytes,
        "disk_bytes": disk.limit_bytes,
        "disk_used_bytes": disk.used_bytes,
        **writes.status(),
        "scratch": [
            _scratch(device, used, now) for device, used in zip(devices, used_bytes, strict=True)
        ],
        "gpus": gpus,
        "clients_left_out": 0,
        "clients": [_client(tenant, writes, now) for tenant in clients],
    }


def to_json(status: Status) -> str:
    """The status as text. With clients beyond the message's size left out, and counted."""
    shown, count = dict(status), len(status["clients"])
    while len(text := json.dumps(shown)) > MAX_TEXT_CHARS and shown["clients"]:
        clients = shown["clients"]
        shown["clients"] = clients[: len(clients) * MAX_TEXT_CHARS // (len(text) + 1)]
        shown["clients_left_out"] = count - len(shown["clients"])
    return text


def _scratch(device: Device, used_bytes: int, now: float) -> Status:
    directory = device.directory
    return {
        "path": str(directory.path),
        "device": f"{os.major(directory.device)}:{os.minor(directory.device)}",
        "device_name": directory.device_name,
        "fs_type": directory.fs_type,
        "direct": directory.direct,
        "in_use": directory.health.in_use,
        "last_failure": directory.health.last_failure,
        "used_bytes": used_bytes,
        "free_bytes": directory.free_bytes(),
        **_traffic(device.traffic, now),
    }


def _client(tenant: Tenant, writes: Writes, now: float) -> Status:
    told = tenant.told
    report = told.report
    return {
        "pid": tenant.who.pid,
        "uid": tenant.who.uid,
        "rank": tenant.who.rank,
        "command": _command(tenant.who),
        "attached_seconds": round(now - tenant.attached_at, 3),
        "arena_bytes": tenant.arena_bytes,
        "disk_bytes": tenant.disk_bytes,
        **_traffic(tenant.traffic, now),
        **writes.status_of(tenant),
        "in_flight": tenant.in_flight,
        "reported_seconds": None if told.at is None else round(now - told.at, 3),
        "cycles": report.cycles,
        "saved_bytes": report.saved_bytes,
        "elided_bytes": report.elided_bytes,
        "loads": report.loads,
        "waits": {
            what.name.lower(): {
                "count": waits(report, what),
                "seconds": round(wait_seconds(report, what), 6),
                "share": round(told.share(what, now), 4),
            }
            for what in WaitFor
        },
    }


def _traffic(traffic: Traffic, now: float) -> Status:
    return {
        "written_bytes": traffic.written.size_bytes,
        "read_bytes": traffic.read.size_bytes,
        "writes": traffic.written.count,
        "reads": traffic.read.count,
        "written_bytes_per_second": int(traffic.written.rate.per_second(now)),
        "read_bytes_per_second": int(traffic.read.rate.per_second(now)),
        "write_failures": dict(traffic.written.failures),
        "read_failures": dict(traffic.read.failures),
    }


def _command(who: Who) -> str:
    """What the client said that it is. Of other users' clients nothing: it is not ours to tell."""
    if who.uid != os.geteuid():
        return ""
    shown = "".join(letter if letter.isprintable() else "?" for letter in who.command)
    return shown if len(shown) <= COMMAND_CHARS else f"{shown[: COMMAND_CHARS - 3]}..."


def fetch_status(socket_dir: Path) -> str:
    """Ask the daemon.

    Raises:
        NoAnswer: None listens there, or it does not answer.
        SocketPathTooLong: The socket's path is over the limit.
    """
    with conversation(socket_dir, "status") as (connection, _):
        send_message(connection, StatusRequest())
        return receive_message(connection, StatusReply)[0].json
