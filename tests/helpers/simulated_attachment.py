"""This process attached to a real daemon, its CPU tensors those of a simulated accelerator."""

from pathlib import Path
from typing import Any
from unittest import mock

import disco_client
from disco_client import connection, session
from disco_client.residency import Residency
from tests.helpers.simulated_gpu import Machine, SimulatedGpu


def attach_simulated(
    socket_dir: Path,
    mode: str,
    *,
    seed: int = 0,
    arena_bytes: int = 64 << 10,
    limit_bytes: int = 32 << 10,
    **settings: Any,
) -> SimulatedGpu:
    """Attach, with an arena of which only the first ``arena_bytes`` are used.

    Args:
        socket_dir: The daemon's.
        mode, seed: As of :class:`Machine`.
        arena_bytes: So few that small tensors go through the disk.
        limit_bytes: As ``staging``.
        settings: More of :func:`disco_client.connect`.
    """

    def small(size_bytes: int, files: int) -> Residency:
        return Residency(arena_bytes, files)

    with mock.patch.object(session, "Residency", small):
        disco_client.connect(socket_dir, **({"arena": "2MiB", "min_bytes": "4KiB"} | settings))
    attached = connection.current()
    gpu = SimulatedGpu(attached.session._arena, Machine(seed, mode, refusals=4))
    gpu.limit_bytes = limit_bytes
    attached.store._devices.make("cpu", lambda unit: gpu)
    return gpu
