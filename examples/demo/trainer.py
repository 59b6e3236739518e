"""One rank of one variant, started by torchrun; it trains one step each time it is told to.

The demo's connection is a unix socket: the rank says who it is, then each line ``step`` from the
demo makes one step and one report. The end of the connection is the end of the training, so that
no rank outlives the demo.
"""

import argparse
import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import disco_client
from examples.demo.messages import DISCOD, PLAIN, Offloaded, Settings, StepReport
from examples.demo.model import GPT, Checkpoint, batch, standard_library_text


def main() -> None:
    """Run the rank that torchrun's environment describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=(PLAIN, DISCOD), required=True)
    parser.add_argument("--conductor", required=True, help="the demo's socket")
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    options = parser.parse_args()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.conductor)
        with connection.makefile("rw") as lines:
            print(options.variant, os.environ["RANK"], file=lines, flush=True)
            torch.distributed.init_process_group("gloo")
            try:
                trainer = Trainer(options.variant, options.settings)
                for _ in lines:
                    print(trainer.step().to_json(), file=lines, flush=True)
                disco_client.close()
            finally:
                torch.distributed.destroy_process_group()


def _plain(layer: nn.Module, hidden: Tensor) -> Tensor:
    result: Tensor = torch_checkpoint(layer, hidden, use_reentrant=False)
    return result


class Trainer:
    """The model, the optimizer and the steps made so far."""

    def __init__(self, variant: str, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        torch.manual_seed(0)
        self.settings = settings
        self.rank = torch.distributed.get_rank()
        self.text = standard_library_text()
        self.steps = 0
        self.offloads = variant == DISCOD
        checkpoint: Checkpoint = _plain
        if self.offloads:
            disco_client.connect(
                settings.socket_dir,
                arena=settings.arena_bytes,
                min_bytes=min(1 << 20, settings.hidden_bytes),
            )
            checkpoint = disco_client.checkpoint
        self.model = GPT(
            layers=settings.layers,
            width=settings.width,
            length=settings.length,
            checkpoint=checkpoint,
        )
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        torch.manual_seed(1 + self.rank)  # each rank drops out on its own

    def step(self) -> StepReport:
        """One step of training on this rank's batch."""
        settings = self.settings
        seed = self.steps * torch.distributed.get_world_size() + self.rank
        text = batch(self.text, seed=seed, rows=settings.rows, length=settings.length)
        torch.distributed.barrier()
        _reset_peak()
        start, cpu = time.perf_counter(), time.process_time()
        loss = self.parallel(text)
        loss.backward()
        self.optimizer.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        report = StepReport(
            rank=self.rank,
            step=self.steps,
            loss=loss.item(),
            gradients={
                name: fingerprint([parameter.grad])
                for name, parameter in self.model.named_parameters()
            },
            parameters=fingerprint(self.model.parameters()),
            random_state=fingerprint([torch.get_rng_state()]),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            peak_bytes=_peak_bytes(settings.arena_bytes if self.offloads else 0),
            offloaded=_last_cycle() if self.offloads else None,
        )
        self.optimizer.zero_grad()
        self.steps += 1
        return report


def fingerprint(tensors: Iterable[Tensor | None]) -> str:
    """A hash of the tensors' bytes: equal only if every bit is."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
        else:
            data = tensor.detach().contiguous().flatten().view(torch.uint8)
            digest.update(data.numpy().data)
    return digest.hexdigest()


def _last_cycle() -> Offloaded:
    cycle = disco_client.stats().last_cycle
    return Offloaded(**{field.name: getattr(cycle, field.name) for field in fields(Offloaded)})


def _reset_peak() -> None:
    """Make VmHWM start again from what is resident now (proc(5)); elsewhere it only ever grows."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(arena_bytes: int) -> int:
    """Peak of this process, and those pages of the arena that it has not mapped itself."""
    kilobytes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "RssShmem"):
            kilobytes[name] = int(value.split()[0])
    return kilobytes["VmHWM"] * 1024 + max(0, arena_bytes - kilobytes["RssShmem"] * 1024)


if __name__ == "__main__":
    main()
