"""One rank of the matrix, as a process: ``python -m tests.compatibility.rank '{...}'``.

Runs every cell, one after the other, and prints one JSON line: what was seen, per row and form,
and the bytes that were read back from disk. A cell that raises does so on all ranks alike, so the
process group stays usable for the next one. Settings: ``store``, a file for the rendezvous, and
``socket_dir``, the daemon's.
"""

import datetime
import json
import os
import re
import sys
import warnings
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor

import disco_client
from tests.compatibility.forms import FORMS, Form
from tests.compatibility.matrix import ROWS
from tests.compatibility.models import MIN_BYTES, Block
from tests.compatibility.rows import Row
from tests.helpers.training import fingerprint

STEPS = 3
ROOM_BYTES = 16 << 10
"""What the cells have of the arena: less than most save in a step, so that blobs go to disk."""

COLLECTIVE_SECONDS = 30
"""A rank that went another way than its peer is an error soon, instead of after half an hour."""


def main() -> None:
    """Run the rank."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, about the forms and settings that are measured here
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{settings['store']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    disco_client.connect(settings["socket_dir"], arena=1, min_bytes=MIN_BYTES)
    ballast = hold_all_but(ROOM_BYTES)
    report: dict[str, Any] = {
        "cells": {row.key: {form.name: measure(row, form, rank) for form in FORMS} for row in ROWS},
        "read_bytes": disco_client.stats().read_bytes,
    }
    del ballast
    print(json.dumps(report), flush=True)
    torch.distributed.destroy_process_group()


def hold_all_but(room_bytes: int) -> torch.Tensor:
    """A loaded tensor, which for as long as it lives holds the rest of the arena.

    The smallest arena is 2 MiB, and models that fill it would take minutes.
    """
    manager = disco_client.Disco.get_instance()
    size_bytes = disco_client.stats().arena_bytes - room_bytes
    handle = manager.save_tensor(torch.zeros(size_bytes, dtype=torch.uint8))
    held = manager.load_tensor(handle)
    manager.cleanup_tensor(handle)
    return held


def measure(row: Row, form: Form, rank: int) -> dict[str, Any]:
    """What one cell did on this rank: its history, its error if any, and what it left behind.

    A graph whose backward raised under DDP is kept alive by torch in part, whatever the form; so
    what an error leaves behind is no fault, and the next cell counts from there.
    """
    before = disco_client.stats()
    seen: dict[str, Any] = {"error": None, "steps": [], "faults": [], "dtypes": []}
    try:
        _train(row, form, rank, before.live_blobs, seen)
    except Exception as error:  # noqa: BLE001  # what a form raises is the result
        seen["error"] = f"{type(error).__name__}: {_first_words(str(error))}"
    seen["saved_bytes"] = disco_client.stats().saved_bytes - before.saved_bytes
    return seen


def _train(row: Row, form: Form, rank: int, live_blobs: int, seen: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = row.build(form.call)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0 if row.same_data else rank)
    for _ in range(STEPS):
        losses = row.step(model, form)
        seen["steps"].append(
            {
                "losses": losses,
                "gradients": _gradients(model),
                "random": fingerprint(torch.get_rng_state()),
            }
        )
        seen["dtypes"].append([m.take_dtypes() for m in model.modules() if isinstance(m, Block)])
        if row.sharded and not _is_sharded(model):
            seen["faults"].append("parameters are not sharded after backward")
        if disco_client.stats().live_blobs > live_blobs:
            seen["faults"].append("blobs are left after backward")
        optimizer.step()
        optimizer.zero_grad()


def _gradients(model: nn.Module) -> dict[str, str | None]:
    """Fingerprints of what this rank holds of every gradient."""
    return {
        name: None if p.grad is None else fingerprint(_local(p.grad))
        for name, p in model.named_parameters()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded(model: nn.Module) -> bool:
    return all(
        isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters()
    )


def _first_words(text: str) -> str:
    """The first clause: what follows has names, numbers and advice."""
    return re.split(r"[.:;(\n]| at \"", text.strip(), maxsplit=1)[0].strip()


if __name__ == "__main__":
    main()
