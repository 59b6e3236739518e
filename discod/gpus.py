"""All GPUs that clients have rings on, by UUID. The daemon never calls CUDA: see
:mod:`discod.gpu_host`, and :mod:`discod.gpu` for the processes that do.
"""

import itertools

from discod.bounds import Refusal
from discod.gpu_host import GpuHost
from discod.gpu_seat import Seat
from discod.loop import Loop

MOST_GPUS = 64
"""At a time: as many as the largest node has, cut into MIG instances. Each has a process, and only
that finds out whether there is such a GPU."""


class Gpus:
    """All GPUs that clients have rings on.

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._gpus: dict[bytes, GpuHost] = {}
        self._numbers = itertools.count(1)

    def seat(self, uuid: bytes, arena_fd: int, arena_bytes: int) -> Seat:
        """A client comes to a GPU, which may turn out not to exist.

        Raises:
            Refusal: Clients have named too many.
        """
        for other in [other for other, gpu in self._gpus.items() if gpu.useless]:
            del self._gpus[other]
        if uuid not in self._gpus and len(self._gpus) >= MOST_GPUS:
            raise Refusal(f"{MOST_GPUS} GPUs have a process, the most at a time; try again later")
        gpu = self._gpus.setdefault(uuid, GpuHost(self._loop, uuid))
        seat = Seat(gpu, next(self._numbers), arena_fd, arena_bytes)
        gpu.add(seat)
        return seat

    def status(self) -> list[dict[str, str | int]]:
        """Each GPU that has a process or clients, for the status."""
        return [
            {
                "uuid": gpu.name,
                "pid": gpu.pid,
                "clients": gpu.clients,
                "copied_bytes": gpu.copied_bytes,
            }
            for gpu in self._gpus.values()
            if not gpu.useless
        ]

    def stop(self) -> None:
        """Kill all processes."""
        for gpu in self._gpus.values():
            gpu.kill()
