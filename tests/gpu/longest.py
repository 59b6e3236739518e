"""``longest``: the longest sequence that fits in a set share of the GPU, plain and with discod.

The lengths double until a variant runs out of memory, or of the time that it has; then the gap to
the longest that fitted is halved some times. The plot has peak memory and step time over length.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

import disco_client
from discod.wire.sizes import format_size
from tests.gpu.bench import Bench, Row, guarded, left_out, missing_transports, name_of, transports
from tests.gpu.llama import Apply, Shape, Task, plain
from tests.gpu.timing import seconds_of
from tests.helpers.plot import Curve, Panel, svg

BUDGET_BYTES = 4 << 30
"""Of GPU memory, weights and gradients included: small, so that no step takes long."""
LAYERS, WIDTH = 48, 512
ARENA = "8GiB"
STAGING = "128MiB"
SHORTEST = 8192
LONGEST = 1 << 20
REFINEMENTS = 2
TIME_SHARE = 0.7
"""Of the part's time, for all variants together; a length that would take longer is not tried."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Fit:
    """A length, and what a step of it took; ``peak_bytes`` is 0 on the CPU."""

    length: int
    seconds: float
    peak_bytes: int


@dataclass(slots=True)
class Search:
    """What was found for one variant.

    Attributes:
        fits: All lengths that fitted, ascending.
        too_long: The shortest length that did not fit; None: the time was over before.
    """

    fits: list[Fit]
    too_long: int | None = None


def run(bench: Bench) -> Iterator[Row]:
    """Both variants over each transport, and the plot."""
    yield from missing_transports(bench)
    if bench.on_gpu:
        total = torch.cuda.get_device_properties(bench.device).total_memory
        torch.cuda.set_per_process_memory_fraction(BUDGET_BYTES / total, bench.device)
    searches: dict[str, Search] = {}
    yield from _rows(bench, "plain", plain, searches)
    for transport in transports(bench):
        yield from guarded(name_of(transport), _with_discod(bench, transport, searches))


def _with_discod(
    bench: Bench, transport: dict[str, str], searches: dict[str, Search]
) -> Iterator[Row]:
    name = f"discod, {name_of(transport)}"
    arena, min_bytes = bench.pick((ARENA, "1MiB"), ("2MiB", "4KiB"))
    with bench.attached(arena=arena, min_bytes=min_bytes, staging=STAGING, **transport):
        yield from _rows(bench, name, disco_client.checkpoint, searches)
    if not bench.on_gpu:
        yield left_out(f"longest, {name}", "needs a GPU")
        return
    longest, before = (searches[variant].fits[-1].length for variant in (name, "plain"))
    value = f"{longest / before:.2f} times as long: {longest} tokens, plain {before}"
    if searches[name].too_long is None:
        value += "; time was over before it was too long"
    yield Row(f"longest, {name}", value, "> 1", longest > before)


def _rows(bench: Bench, name: str, apply: Apply, searches: dict[str, Search]) -> Iterator[Row]:
    """Search, and draw what is known by then."""
    found = searches[name] = _search(bench, apply)
    for fit in found.fits:
        memory = f"{format_size(fit.peak_bytes)}, " if bench.on_gpu else ""
        yield Row(f"{name}, {fit.length} tokens", f"{memory}{fit.seconds:.3f} s", data=asdict(fit))
    if found.too_long is not None:
        yield Row(f"{name}, {found.too_long} tokens", "out of memory")
    (bench.out / "longest.svg").write_text(plot(searches))


def _search(bench: Bench, apply: Apply) -> Search:
    shortest, longest = bench.pick((SHORTEST, LONGEST), (128, 256))
    return search(
        lambda length: try_length(bench, apply, length),
        shortest,
        longest,
        bench.pick(REFINEMENTS, 0),
        TIME_SHARE * bench.seconds / (1 + len(transports(bench))),
    )


def search(
    attempt: Callable[[int], Fit | None],
    shortest: int,
    longest: int,
    refinements: int,
    seconds: float,
) -> Search:
    """Double from ``shortest`` to ``longest``, then halve the gap; ``attempt`` says what fits.

    Raises:
        RuntimeError: Not even the shortest fits.
    """
    began = time.monotonic()
    found = Search([])

    def attempted(length: int) -> bool:
        """Whether it was tried, or had no time left."""
        left = seconds - (time.monotonic() - began)
        if found.fits:
            last = found.fits[-1]
            # Attention grows with the square; an attempt is two steps, and some more.
            if 3 * last.seconds * (length / last.length) ** 2 > left:
                return False
        fit = attempt(length)
        if fit is None:
            found.too_long = length
        else:
            found.fits.append(fit)
        return True

    length = shortest
    while length <= longest and found.too_long is None and attempted(length):
        length *= 2
    if not found.fits:
        raise RuntimeError(f"not even {shortest} tokens fit in the memory that was set")
    for _ in range(refinements if found.too_long is not None else 0):
        last = found.fits[-1].length
        middle = (last + (found.too_long or last)) // 2 // 1024 * 1024
        if middle <= last or not attempted(middle):
            break
    return found


def try_length(bench: Bench, apply: Apply, length: int) -> Fit | None:
    """A step of that length, the second of two; None when the memory does not suffice."""
    layers, width = bench.pick((LAYERS, WIDTH), (4, 128))
    head_width = bench.pick(128, 64)
    shape = Shape(layers=layers, width=width, batch=1, length=length, head_width=head_width)
    fit = None
    with contextlib.suppress(torch.OutOfMemoryError):
        fit = _measure(bench, apply, shape)
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    return fit


def _measure(bench: Bench, apply: Apply, shape: Shape) -> Fit:
    task = Task.make(shape, bench.device, bench.dtype)
    task.step(apply)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = seconds_of(bench, lambda: task.step(apply))
    peak = torch.cuda.max_memory_allocated(bench.device) if bench.on_gpu else 0
    return Fit(shape.length, seconds, peak)


def plot(searches: dict[str, Search]) -> str:
    """Two panels: peak memory and step time over sequence length."""
    found = searches.items()
    memory = [
        Curve(name, [(f.length / 1000, f.peak_bytes / GIB) for f in search.fits])
        for name, search in found
    ]
    times = [
        Curve(name, [(f.length / 1000, f.seconds) for f in search.fits]) for name, search in found
    ]
    x_label = "thousand tokens"
    return svg(
        [Panel("peak GPU memory, GiB", x_label, memory), Panel("step time, s", x_label, times)]
    )
