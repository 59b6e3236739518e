"""A training job as a process: ``python -m tests.gpu.trainer '{"device": "cuda", ...}'``.

Prints ``ready`` after its first forward, waits for a line on stdin, and at the end prints one JSON
line: a fingerprint of all gradients for each step, and the bytes that went to disk. Settings:

device; layers, width, length: of the stack and its input; form: plain or checkpoint; steps;
connect: keywords of disco_client.connect(); ballast: bytes to hold on the device beside it.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import disco_client
from tests.gpu.llama import Apply, Shape, Task, plain

FORMS: dict[str, Apply] = {"plain": plain, "checkpoint": disco_client.checkpoint}


def train(settings: dict[str, Any], ready: Callable[[], object] = lambda: None) -> list[str]:
    """Train; a fingerprint of all gradients after each step. ``ready()``: in the first one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    shape = Shape(settings["layers"], settings["width"], 2, settings["length"], head_width=64)
    task = Task.make(shape, torch.device(settings["device"]), torch.float32, dropout=0.1)
    optimizer = torch.optim.SGD(task.stack.parameters(), lr=1e-4)
    prints = []
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(settings["steps"]):
            task.step(FORMS[settings["form"]], between=ready if step == 0 else lambda: None)
            digest = hashlib.blake2b(digest_size=16)
            for gradient in task.gradients():
                digest.update(gradient.cpu().numpy().data)
            prints.append(digest.hexdigest())
            optimizer.step()
    return prints


def main() -> None:
    """Run the job that the first argument describes."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    disco_client.connect(**settings["connect"])
    ballast = torch.empty(settings.get("ballast", 0), dtype=torch.uint8, device=settings["device"])

    def ready() -> None:
        if ballast.is_cuda:
            torch.cuda.synchronize()
        print("ready", flush=True)
        sys.stdin.readline()

    prints = train(settings, ready)
    stats = disco_client.stats()
    report = {"prints": prints, "written_bytes": stats.written_bytes, "live": stats.live_blobs}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
