"""How much of the time of copies to and from the GPU lies under kernels, by torch's profiler."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.gpu.bench import Bench

Span = tuple[float, float]
"""Begin and end, in microseconds."""

COPIES = ("Memcpy DtoH", "Memcpy HtoD")
"""How the names of what discod starts begin; ``Memcpy DtoD`` is the model's own."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """One step, in microseconds.

    Attributes:
        copies: Time of all copies.
        covered: Of it, while a kernel ran.
        pinned: Of it, from or to pinned memory.
    """

    copies: float
    covered: float
    pinned: float


def measure(bench: Bench, step: Callable[[], object], trace: Path) -> Overlap:
    """Profile one step; its trace is left in ``trace``, for a look in a viewer."""
    activities = [ProfilerActivity.CPU]
    if bench.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    bench.synchronize()
    with profile(activities=activities) as profiler:
        step()
        bench.synchronize()
    profiler.export_chrome_trace(str(trace))
    return of_events(json.loads(trace.read_text())["traceEvents"])


def of_events(events: Iterable[dict[str, Any]]) -> Overlap:
    """From the events of a Chrome trace, as torch's profiler writes it."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = merged(_span(event) for event in timed if event.get("cat") == "kernel")
    copies = [
        event
        for event in timed
        if event.get("cat") == "gpu_memcpy" and event["name"].startswith(COPIES)
    ]
    return Overlap(
        copies=sum(float(event["dur"]) for event in copies),
        covered=sum(_covered(_span(event), kernels) for event in copies),
        pinned=sum(float(event["dur"]) for event in copies if "Pinned" in event["name"]),
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _covered(span: Span, by: Sequence[Span]) -> float:
    start, end = span
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in by)


def _span(event: dict[str, Any]) -> Span:
    start = float(event["ts"])
    return start, start + float(event["dur"])
