"""A session whose device and daemon are both simulated, in one thread and without any sleep."""

import ctypes
from typing import Any, cast

import torch

from disco_client.arena import Arena
from disco_client.devices.known import Devices
from disco_client.link import Link
from disco_client.residency import Group
from disco_client.session import Session
from disco_client.store import Store
from disco_client.stored import StoredTensor
from discod.wire import PAGE_BYTES
from tests.helpers.simulated_daemon import SimulatedDaemon
from tests.helpers.simulated_gpu import Machine, Memory, SimulatedGpu


def page(value: int, pages: int = 1) -> bytes:
    """What a tensor of that value has for bytes."""
    return bytes([value]) * pages * PAGE_BYTES


class Rig:
    """All of an attachment.

    Args:
        seed, mode, lazy: As of :class:`Machine`.
        pages: Of the arena.
        keep: As ``keep_on_device``.
        limit_bytes: As ``staging``.
        gpu: The device's class.
    """

    def __init__(
        self,
        seed: int = 0,
        mode: str = "random",
        *,
        lazy: bool = False,
        pages: int = 16,
        keep: int | None = 1,
        limit_bytes: int = 1 << 20,
        gpu: type[SimulatedGpu] = SimulatedGpu,
    ) -> None:
        self.arena = Arena(pages * PAGE_BYTES)
        self.arena.size_bytes = pages * PAGE_BYTES
        self.machine = Machine(seed, mode, lazy=lazy)
        self.memory = Memory(self.machine)
        self.gpu = gpu(self.arena, self.machine, self.memory if lazy else None)
        self.gpu.limit_bytes = limit_bytes
        self.daemon = SimulatedDaemon(self.arena, seed, mode)
        self.devices = Devices(self.arena, makers={"cpu": lambda unit: self.gpu})
        self.session = Session(self.arena, cast(Link, self.daemon), self.devices, keep)
        self.store = Store(self.session, self.devices)
        self.group = Group()

    def save(self, tensor: torch.Tensor, *, at_once: bool = False, group: Any = None) -> Any:
        """A stored tensor."""
        return StoredTensor(self.store, tensor, group or self.group, at_once=at_once)

    def load_elsewhere(self, stored: Any) -> bytes:
        """The tensor's bytes, loaded to another place than its device."""
        view, _ = self.session.load(stored._live_blob(), stored.spec.nbytes)
        return ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))

    # Lazily computed tensors

    def value(self, value: int, pages: int = 1) -> torch.Tensor:
        """New memory, which a kernel fills with ``value``."""
        tensor = self.memory.empty(pages * PAGE_BYTES)
        self.memory.write(tensor, value)
        return tensor

    def change(self, tensor: torch.Tensor, value: int) -> None:
        """A kernel that changes a tensor in place, of which torch knows as of any change."""
        self.memory.write(tensor, value)
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))

    def seen(self, tensor: torch.Tensor) -> list[bytes]:
        """Where a kernel will put what it reads."""
        into: list[bytes] = []
        self.memory.read(tensor, into)
        return into

    # The end

    @property
    def live_copies(self) -> bool:
        """Whether the session holds anything of a copy."""
        staging = self.session._staging
        return bool(staging._leaving or staging._arriving or staging._sources or staging._ahead)

    def check(self) -> None:
        """Do all that was given; nothing went wrong so far."""
        self.machine.finish()
        assert self.machine.violations == []
        assert self.daemon.violations == []

    def finish(self) -> None:
        """As :meth:`check`, once everything was dropped: nothing is left."""
        self.check()
        for _ in range(100):
            stats = self.session.stats()
            self.daemon.wait(0)
            if not self.session._staging.pending and not self.daemon._io:
                break
        assert stats.live_blobs == 0
        assert self.session._residency.arena_used_bytes == 0
        assert not self.live_copies
        self.session.close()
