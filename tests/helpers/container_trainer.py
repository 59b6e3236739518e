"""A trainer for a container of its own: ``python -m tests.helpers.container_trainer SETTINGS``.

It trains one step with discod and one with plain torch, saves some blobs, and reports as a line of
JSON what it was like. Then, as SETTINGS says, it loads the blobs for every line that it is given
(``wait``), or does nothing until it is killed (``crash``).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as plain_checkpoint

import disco_client


def step(form: Any) -> list[torch.Tensor]:
    """The gradients of a small model."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(6)]
    hidden = torch.randn(2048, 256, requires_grad=True)
    out = hidden
    for layer in layers:
        out = form(lambda x, layer=layer: torch.tanh(layer(x)), out)
    out.square().sum().backward()
    assert hidden.grad is not None
    weights = [p.grad for layer in layers for p in layer.parameters()]
    return [hidden.grad, *(grad for grad in weights if grad is not None)]


def main(settings: dict[str, Any]) -> None:
    """Train, report, and do as told."""
    expected = step(lambda f, x: plain_checkpoint(f, x, use_reentrant=False))
    disco_client.connect(
        settings["socket_dir"],
        scratch=settings.get("scratch"),
        arena=settings.get("arena", "4MiB"),
        min_bytes="4KiB",
    )
    got = step(disco_client.checkpoint)
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(12)]
    stats = disco_client.stats()
    threads = {name: module for name, module in sys.modules.items() if "resource_tracker" in name}
    report = {
        "pid": os.getpid(),
        "equal": len(got) == len(expected)
        and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)),
        "written": stats.written_bytes,
        "read": stats.read_bytes,
        "shm": os.listdir("/dev/shm"),
        "shm_bytes": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
        "arena": "memfd:discod-arena" in Path("/proc/self/maps").read_text(),
        "trackers": [n for n, m in threads.items() if m._resource_tracker._fd is not None],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }
    print(json.dumps(report), flush=True)
    if settings["then"] == "wait":
        for _ in sys.stdin:
            for number, handle in enumerate(handles):
                loaded = manager.load_tensor(handle)
                assert torch.equal(loaded, torch.full((1 << 18,), float(number)))
            zombies = [
                pid
                for pid in os.listdir("/proc")
                if pid.isdecimal() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
            ]
            print(json.dumps({"loaded": len(handles), "zombies": len(zombies)}), flush=True)
    elif settings["then"] == "crash":
        sys.stdin.read()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
