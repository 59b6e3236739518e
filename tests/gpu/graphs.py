"""``graphs``: CUDA graphs beside saves, and which GPUs a process sees."""

import os
from collections.abc import Iterator
from typing import Any

import torch

import disco_client
from tests.gpu.bench import Bench, Row, guarded, left_out
from tests.gpu.faults import CONNECT, FULL, PROGRAM, REPORT_SECONDS
from tests.gpu.trainer import train
from tests.helpers.jobs import Rank

NUMBERS = 1 << 20
REPLAYS = 20


def run(bench: Bench) -> Iterator[Row]:
    """Captures, then one GPU of several, then several in one process."""
    torch.ones(NUMBERS, device=bench.device) * 2 + 1  # loads the kernels, which a capture cannot
    with bench.attached(arena="64MiB"):
        yield from guarded("save in a capture", _refused(bench))
        yield from guarded("saves between replays", _between_replays(bench))
    if torch.cuda.device_count() > 1:
        yield from guarded("CUDA_VISIBLE_DEVICES", _one_of_several(bench))
        yield from guarded("two GPUs in one process", _two_at_once(bench))
    else:
        yield left_out("several GPUs", "there is one")
    # Last, because a capture that fails takes the process's later work with it.
    with bench.attached(arena="64MiB"):
        yield from guarded("handle dropped in a capture", _dropped(bench))


def _refused(bench: Bench) -> Iterator[Row]:
    manager = disco_client.DiskOffloadManager()
    source = torch.ones(NUMBERS, device=bench.device)
    saved = manager.save_tensor(source)
    raised = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
        for call in (lambda: manager.save_tensor(doubled), lambda: manager.load_tensor(saved)):
            try:
                call()
            except disco_client.UnsupportedCall as error:
                raised.append(type(error).__name__)
    graph.replay()
    works = bool((doubled == 2).all())
    value = f"{len(raised)} of 2 raise; the graph {'works' if works else 'is BROKEN'}"
    yield Row("save and load in a capture", value, "raise", len(raised) == 2 and works)
    again = torch.equal(manager.load_tensor(saved), source)
    yield Row("load after it", "equal" if again else "DIFFERS", "equal", again)


def _between_replays(bench: Bench) -> Iterator[Row]:
    """A replay writes to its output without torch's noticing, right after that was saved."""
    manager = disco_client.DiskOffloadManager()
    source = torch.zeros(NUMBERS, device=bench.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = source * 2 + 1
    handles = []
    for number in range(REPLAYS):
        source.fill_(float(number))
        graph.replay()
        handles.append(manager.save_tensor(result))
    wrong = sum(
        not bool((manager.load_tensor(handle) == 2 * number + 1).all())
        for number, handle in enumerate(handles)
    )
    yield Row("saves between replays", f"{wrong} of {REPLAYS} wrong", "0", wrong == 0)


def _dropped(bench: Bench) -> Iterator[Row]:
    """The end of a handle looks at copies under way, which a capture forbids in its thread."""
    manager = disco_client.DiskOffloadManager()
    source = torch.ones(NUMBERS, device=bench.device)
    handles = [manager.save_tensor(source + number) for number in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
        handles.clear()
    graph.replay()
    works = bool((doubled == 2).all())
    kept = manager.save_tensor(source)
    again = torch.equal(manager.load_tensor(kept), source)
    value = f"the graph {'works' if works else 'is BROKEN'}, and discod {again}"
    yield Row("handle dropped in a capture", value, "both work", works and again)


def _one_of_several(bench: Bench) -> Iterator[Row]:
    """The last GPU alone, as ``cuda:0`` of a process that sees no other."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in visible.split(",") if name]
    last = names[-1] if names else str(torch.cuda.device_count() - 1)
    settings: dict[str, Any] = FULL | {"device": "cuda"}
    with torch.cuda.device(torch.cuda.device_count() - 1):
        expected = train(settings | {"form": "plain"})
    daemon = bench.start_daemon()
    connect = CONNECT | {"socket_dir": str(daemon.socket_dir)}
    rank = Rank(
        settings | {"form": "checkpoint", "connect": connect},
        PROGRAM,
        fresh=True,
        CUDA_VISIBLE_DEVICES=last,
    )
    try:
        rank.wait_ready()
        rank.go_on()
        same = rank.report(REPORT_SECONDS)["prints"] == expected
        value = f"GPU {last}: {'equal' if same else 'DIFFERS'}"
        yield Row("CUDA_VISIBLE_DEVICES", value, "bit-equal", same)
    finally:
        rank.kill()
        daemon.close()


def _two_at_once(bench: Bench) -> Iterator[Row]:
    """Tensors of two GPUs saved in turns; each comes back to its own, and can go to the other."""
    devices = [torch.device("cuda", index) for index in range(2)]
    with bench.attached(arena="64MiB", keep_on_device=0):
        manager = disco_client.DiskOffloadManager()
        sources = [
            torch.full((NUMBERS,), float(number), device=devices[number % 2])
            for number in range(32)
        ]
        handles = [manager.save_tensor(source) for source in sources]
        wrong = 0
        for source, handle in zip(reversed(sources), reversed(handles), strict=True):
            own = manager.load_tensor(handle)
            other = manager.load_tensor(handle, devices[1 - source.device.index])
            wrong += own.device != source.device or not torch.equal(own, source)
            wrong += not torch.equal(other.cpu(), source.cpu())
    yield Row("two GPUs in one process", f"{wrong} of {2 * len(sources)} wrong", "0", wrong == 0)
