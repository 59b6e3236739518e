"""One rank of a training job, as a process: ``python -m tests.helpers.rank '{"forms": [...]}'``.

Prints ``ready`` after the first forward (and then waits for a line on stdin if ``pause`` is set),
and at the end one JSON line with the history, the stats and the rank. Settings:

forms: of plain, reentrant, checkpoint and disco, one run after the other; model: keywords of GPT;
train: keywords of train(); connect: keywords of disco_client.connect(); pause: whether to wait
after the first forward;
store: a file for torch.distributed's rendezvous, or absent outside a job.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed
from torch import nn

import disco_client
from tests.helpers.models import GPT, plain_checkpoint, reentrant_checkpoint
from tests.helpers.training import train

FORMS: dict[str, Any] = {
    "plain": plain_checkpoint,
    "reentrant": reentrant_checkpoint,
    "checkpoint": disco_client.checkpoint,
    "disco": disco_client.Disco.apply,
}


def main() -> None:
    """Run the rank."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if "store" in settings:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{settings['store']}",
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    if "connect" in settings:
        disco_client.connect(**settings["connect"])

    def after_forward(step: int) -> None:
        if step == 0:
            print("ready", flush=True)
            if settings.get("pause"):
                sys.stdin.readline()

    history = {}
    for form in settings["forms"]:
        torch.manual_seed(0)
        model: nn.Module = GPT(FORMS[form], **settings.get("model", {}))
        if "store" in settings:
            model = nn.parallel.DistributedDataParallel(model)
        keywords = settings.get("train", {})
        history[form] = train(model, seed=rank, after_forward=after_forward, **keywords)
    stats = disco_client.stats()
    report = {"rank": rank, "history": history, "live_blobs": stats.live_blobs}
    report["written_bytes"] = stats.written_bytes
    report["read_bytes"] = stats.read_bytes
    print(json.dumps(report), flush=True)
    if "store" in settings:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
