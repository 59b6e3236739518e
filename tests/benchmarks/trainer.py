"""One rank of one system: ``python -m tests.benchmarks.trainer SETTINGS``, SETTINGS in JSON.

A worker: each line that it is told is a number of steps to make, and the answer has a report for
each, in JSON. The end of stdin is the end of the training.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import disco_client
from tests.benchmarks.systems import ATTACHED, Attachment, open_system
from tests.benchmarks.workers import answering
from tests.benchmarks.workloads import Workload, make_batch, make_model


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rank does.

    Attributes:
        store: A file for the ranks to meet at.
    """

    system: str
    workload: Workload
    attachment: Attachment
    rank: int
    threads: int
    store: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        fields["workload"] = Workload(**fields["workload"])
        fields["attachment"] = Attachment(**fields["attachment"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of one rank.

    Attributes:
        seconds: Forward, backward and the optimizer's step.
        cpu_seconds: Of this process, all threads.
        gradients: A hash of all gradients' bytes, after the all-reduce.
        peak_bytes: Most resident memory of the process during the step, all of its arena included.
        traffic: The cycle's counters (``disco_client.Counters``); None without discod.
        totals: Bytes written and read since the start, by discod's counters.
        file_bytes: Bytes that the process dirtied in the page cache, those of them that were given
            up before they reached a device, and those it read from one.
    """

    step: int
    seconds: float
    cpu_seconds: float
    loss: float
    gradients: str
    peak_bytes: int
    traffic: dict[str, float] | None
    totals: dict[str, int]
    file_bytes: dict[str, int]


class Trainer:
    """The model, the optimizer and the steps made so far."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._offloads = settings.system in ATTACHED
        workload = settings.workload
        self._model = make_model(workload, open_system(settings.system, settings.attachment))
        self._parallel: nn.Module = self._model
        if workload.ranks > 1:
            self._parallel = DistributedDataParallel(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-2)
        self._steps = 0

    def step(self) -> StepReport:
        """One step on this rank's data for it."""
        workload = self._settings.workload
        data = make_batch(workload, self._steps * workload.ranks + self._settings.rank)
        if workload.ranks > 1:
            torch.distributed.barrier()
        files = _file_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on (proc(5))
        start, cpu = time.perf_counter(), time.process_time()
        loss: Tensor = self._parallel(data)
        loss.backward()
        self._optimizer.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        report = StepReport(
            step=self._steps,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            loss=loss.item(),
            gradients=fingerprint(parameter.grad for parameter in self._model.parameters()),
            peak_bytes=_peak_bytes(self._settings.attachment.arena_bytes if self._offloads else 0),
            traffic=asdict(disco_client.stats().last_cycle) if self._offloads else None,
            totals=self._totals(),
            file_bytes={name: value - files[name] for name, value in _file_bytes().items()},
        )
        self._optimizer.zero_grad()
        self._steps += 1
        return report

    def _totals(self) -> dict[str, int]:
        if not self._offloads:
            return {"written_bytes": 0, "read_bytes": 0}
        stats = disco_client.stats()
        return {"written_bytes": stats.written_bytes, "read_bytes": stats.read_bytes}


def fingerprint(tensors: Iterable[Tensor | None]) -> str:
    """A hash of the tensors' bytes; two differ if a bit does.

    Raises:
        ValueError: One is None: it has no gradient.
    """
    digest = xxhash.xxh3_128()
    for number, tensor in enumerate(tensors):
        if tensor is None:
            raise ValueError(f"parameter {number} has no gradient")
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _peak_bytes(arena_bytes: int) -> int:
    """Peak of this process, and those pages of the arena that it has not mapped itself."""
    kilobytes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "RssShmem"):
            kilobytes[name] = int(value.split()[0])
    return kilobytes["VmHWM"] * 1024 + max(0, arena_bytes - kilobytes["RssShmem"] * 1024)


def _file_bytes() -> dict[str, int]:
    counters = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text().splitlines() if line
    )
    return {
        name: int(counters[name]) for name in ("write_bytes", "cancelled_write_bytes", "read_bytes")
    }


def main() -> None:
    """Run the rank."""
    settings = Settings.from_json(sys.argv[1])
    with answering() as answer:
        workload = settings.workload
        if workload.ranks > 1:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{settings.store}",
                rank=settings.rank,
                world_size=workload.ranks,
            )
        trainer = Trainer(settings)
        answer("ready")
        for line in sys.stdin:
            answer(json.dumps([asdict(trainer.step()) for _ in range(int(line))]))
        if settings.system in ATTACHED:
            disco_client.close()
        if workload.ranks > 1:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
