"""Other engines that put tensors on disk, each from its own package: DeepSpeed's and TensorNVMe's.

Each writes and reads whole tensors, in the way its documentation shows, and is left out, with the
reason, where it is not installed or fails.
"""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from tests.benchmarks.frame import Progress, WrongBytes
from tests.benchmarks.reference import Fio
from tests.benchmarks.spread import ratios

TENSOR_BYTES = 64 << 20
TENSORS = 12
ROUNDS = 5


class Engine(Protocol):
    """One engine with its files."""

    def write(self, number: int, tensor: torch.Tensor) -> None:
        """Start or do the write of a tensor."""

    def read(self, number: int, tensor: torch.Tensor) -> None:
        """Start or do the read of a tensor."""

    def finish(self) -> None:
        """Until all that was started is done."""

    def tensor(self) -> torch.Tensor:
        """Memory as the engine likes it best."""


class DeepSpeed:
    """``async_io`` with page-aligned, locked tensors, which is its fastest way."""

    def __init__(self, directory: Path) -> None:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
        # block size, queue depth, single submit, overlap events, threads
        self._handle: Any = builder.load(verbose=False).aio_handle(8 << 20, 32, False, True, 2)
        self._directory = directory

    def write(self, number: int, tensor: torch.Tensor) -> None:
        self._handle.sync_pwrite(tensor, str(self._directory / f"deepspeed-{number}"))

    def read(self, number: int, tensor: torch.Tensor) -> None:
        self._handle.sync_pread(tensor, str(self._directory / f"deepspeed-{number}"))

    def finish(self) -> None:
        """All calls wait."""

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8)
        locked: torch.Tensor = self._handle.new_cpu_locked_tensor(TENSOR_BYTES, empty)
        return locked


class TensorNvme:
    """``DiskOffloader`` over one file."""

    def __init__(self, directory: Path) -> None:
        module: Any = importlib.import_module("tensornvme")
        self._offloader = module.DiskOffloader(str(directory), n_entries=16, backend="uring")
        self._held: dict[int, torch.Tensor] = {}

    def write(self, number: int, tensor: torch.Tensor) -> None:
        held = self._held.setdefault(number, torch.empty_like(tensor))
        if held.storage().size() == 0:
            held.storage().resize_(TENSOR_BYTES)
        held.copy_(tensor)
        self._offloader.sync_write(held)

    def read(self, number: int, tensor: torch.Tensor) -> None:
        held = self._held[number]
        self._offloader.sync_read(held)
        tensor.copy_(held)

    def finish(self) -> None:
        """All calls wait."""

    def tensor(self) -> torch.Tensor:
        return torch.empty(TENSOR_BYTES, dtype=torch.uint8)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "DeepSpeed async_io": DeepSpeed,
    "TensorNVMe": TensorNvme,
}


def measure(directory: Path, fio: Fio, progress: Progress) -> list[dict[str, Any]]:
    """Each engine against fio, alternating; a reason for each that cannot be run."""
    found = []
    for name, make in ENGINES.items():
        progress(name)
        try:
            found.append({"name": name, **_measure(make(directory), fio)})
        except WrongBytes:
            raise
        except Exception as error:  # noqa: BLE001  a peer that fails is told, whatever it raises
            lines = str(error).strip().splitlines() or [""]
            found.append({"name": name, "failure": f"{type(error).__name__}: {lines[0]:.200}"})
    return found


def _measure(engine: Engine, fio: Fio) -> dict[str, Any]:
    source, target = engine.tensor(), engine.tensor()
    source.random_(0, 256)
    rates: dict[str, list[float]] = {"write": [], "read": []}
    others: dict[str, list[float]] = {"write": [], "read": []}
    cpu = {"write": 0.0, "read": 0.0}

    def write(number: int) -> None:
        source[0] = number
        engine.write(number, source)

    def read(number: int) -> None:
        engine.read(number, target)
        if target[0] != number:
            raise WrongBytes(f"tensor {number} came back as {int(target[0])}")

    for number in range(TENSORS):  # which makes the extents
        write(number)
    engine.finish()
    read(0)
    if not torch.equal(target[1:], source[1:]):
        raise WrongBytes("a tensor came back different")
    for _ in range(ROUNDS):
        for direction, call in (("write", write), ("read", read)):
            others[direction].append(fio.run(direction))
            began, spent = time.perf_counter(), time.process_time()
            for number in range(TENSORS):
                call(number)
            engine.finish()
            rates[direction].append(TENSORS * TENSOR_BYTES / (time.perf_counter() - began))
            cpu[direction] += time.process_time() - spent
    gigabytes = ROUNDS * TENSORS * TENSOR_BYTES / 1e9
    return {
        "cpu": {direction: seconds / gigabytes for direction, seconds in cpu.items()},
        **{d: {"fio": ratios(rates[d], others[d])} for d in ("write", "read")},
    }
