"""Finds the device for a tensor: one object per device type, made when it is first needed."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from disco_client.arena import Arena
from disco_client.cuda import Cuda
from disco_client.devices.interface import Device
from disco_client.devices.streamed import Streamed

Maker = Callable[[torch.device], Device | None]
"""Makes a device; its first unit is given, since a process may have a context on no other."""


class Devices:
    """The devices of one attachment, which are what :class:`disco_client.staging.Units` asks for.

    Args:
        arena: What they copy to and from.
        staging_bytes: In place of each device's own bound.
        makers: How to make a device type's, in place of the usual way. None of it: its tensors are
            copied by the calling thread, which waits.
    """

    def __init__(
        self,
        arena: Arena,
        staging_bytes: int | None = None,
        makers: Mapping[str, Maker] | None = None,
    ) -> None:
        self._arena = arena
        self._staging_bytes = staging_bytes
        self._makers = dict(makers or {})
        self._lock = threading.Lock()
        self._known: dict[str, Device | None] = {}
        self._limits: dict[torch.device, int] = {}

    def make(self, kind: str, maker: Maker) -> None:
        """Have ``maker`` make a device type's, in place of the usual way; before it is needed."""
        self._makers[kind] = maker

    def of(self, device: torch.device) -> Device | None:
        """The device that ``device`` is a unit of; None: copies wait, as on the CPU."""
        kind = device.type
        if kind not in self._known:
            with self._lock:
                if kind not in self._known:
                    make = self._makers.get(kind, self._usual)
                    self._known[kind] = make(self.unit(device))
        return self._known[kind]

    def at(self, device: torch.device) -> Device:
        """As :meth:`of`, of a unit that copies run on."""
        found = self.of(device)
        if found is None:
            raise ValueError(f"tensors of {device} are copied by the calling thread")
        return found

    def unit(self, device: torch.device) -> torch.device:
        """``device`` with its index: ``cuda`` is the calling thread's current one."""
        index: int | None = device.index  # torch's own types leave the None out
        module = _module(device)
        if index is not None or not hasattr(module, "current_device"):
            return device
        return torch.device(device.type, module.current_device())

    def reachable(self) -> bool:
        """As :meth:`disco_client.staging.Units.reachable`."""
        return all(device.reachable() for device in self._all())

    def limit_bytes(self, device: torch.device) -> int:
        """As :meth:`disco_client.staging.Units.limit_bytes`."""
        if self._staging_bytes is not None:
            return self._staging_bytes
        if device not in self._limits:
            self._limits[device] = self.at(device).staging_bytes(device)
        return self._limits[device]

    def shortages(self, device: torch.device) -> int:
        """As :meth:`disco_client.staging.Units.shortages`."""
        return self.at(device).shortages(device)

    def close(self) -> None:
        """Close each, once its copies have ended."""
        for device in self._all():
            device.close()

    def _all(self) -> list[Device]:
        """Those that are known by now: another thread may need the next one meanwhile."""
        return [device for device in list(self._known.values()) if device is not None]

    def _usual(self, device: torch.device) -> Device | None:
        if device.type == "cuda":
            return Cuda(self._arena, device)
        module = _module(device)
        needed = ("Stream", "stream", "current_stream")
        if all(hasattr(module, name) for name in needed):
            return Streamed(self._arena, module)
        return None


def _module(device: torch.device) -> Any:
    """What torch has for the device type; None for the CPU, and for types without any."""
    if device.type == "cpu":  # its module has streams that are none
        return None
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None
