"""One of two FSDP2 ranks of Accelerate: ``python -m tests.helpers.accelerate_rank FOLDER PAGE``.

Trains a model with the accelerator that the Python block of PAGE makes, first with discod's patch
and then without, and reports in FOLDER.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed
from accelerate.utils import DistributedType

import disco_client
import disco_client.patches.accelerate
from tests.helpers.pages import run_page
from tests.helpers.plain_script import Model, train


class Accelerator(accelerate.Accelerator):
    """Accelerate's own, which would not choose FSDP on a CPU."""

    def __init__(self, fsdp_plugin: Any) -> None:
        super().__init__(cpu=True)
        self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = fsdp_plugin


def run(page: str, rank: int) -> tuple[list[torch.Tensor], list[str]]:
    """Train by the page: the whole weights at the end, and the names of the model's state."""
    torch.manual_seed(0)
    model = Model(recompute=False)
    model._no_split_modules = ["Sequential"]  # as models of transformers have it
    accelerator = run_page(page)["accelerator"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(rank)
    train(model, optimizer, accelerator.backward)
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    return weights, list(model.state_dict())


def main() -> None:
    """Run the rank."""
    folder, page = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder.absolute()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    accelerate.Accelerator = Accelerator
    weights, names = run(page, rank)
    blobs = disco_client.stats().saved_blobs
    disco_client.patches.accelerate.disable()
    disco_client.patches.accelerate.enable = lambda: None
    plain_weights, plain_names = run(page, rank)
    report = {
        "equal": all(map(torch.equal, weights, plain_weights)),
        "same_names": names == plain_names,
        "blobs": blobs,
        "later_blobs": disco_client.stats().saved_blobs - blobs,
        "live_blobs": disco_client.stats().live_blobs,
    }
    (folder / f"report{rank}").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
