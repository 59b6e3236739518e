"""``equality``: gradients through discod are those of plain training and checkpointing, bit by bit.

Attention is torch's plain (math) form under deterministic algorithms, since the fused backward may
add in any order; one variant takes what torch takes by default, and counts where torch's form
equals itself.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import disco_client
from discod.wire.sizes import format_size
from tests.gpu.bench import (
    Bench,
    Row,
    guarded,
    ipc_use,
    left_out,
    missing_transports,
    name_of,
    transports,
)
from tests.gpu.llama import Apply, Shape, Task
from tests.helpers.forms import ALL, Form

FULL = Shape(layers=16, width=512, batch=2, length=256)
"""Inputs of 1 MiB in float32: twice the arena in all, so that the disk is used."""
QUICK = Shape(layers=4, width=64, batch=1, length=64, head_width=32)
CYCLES = 2
"""The first one knows nothing of the order; the second has learned it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How the model computes."""

    name: str
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    autocast: bool = False
    math: bool = True

    def around(self) -> AbstractContextManager[Any]:
        """The attention to use."""
        return sdpa_kernel(SDPBackend.MATH) if self.math else nullcontext()


VARIANTS = (
    Variant("fp32"),
    Variant("bf16", torch.bfloat16),
    Variant("dropout", dropout=0.1),
    Variant("autocast", dropout=0.1, autocast=True),
    Variant("bf16 fused", torch.bfloat16, math=False),
)


def run(bench: Bench) -> Iterator[Row]:
    """All forms, in all variants, over each transport, with and without copies that stay."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield from missing_transports(bench)
    oracles = Oracles(bench)
    for transport in transports(bench):
        for keep in (None, 0) if bench.on_gpu else (None,):
            where = name_of(transport) + ("" if keep is None else f", keep_on_device={keep}")
            rows = _with_settings(bench, where, keep, transport, oracles)
            yield from guarded(where, rows)


def _with_settings(
    bench: Bench, where: str, keep: int | None, transport: dict[str, str], oracles: "Oracles"
) -> Iterator[Row]:
    arena, min_bytes = bench.pick(("8MiB", "128KiB"), ("2MiB", "4KiB"))
    settings: dict[str, Any] = {"arena": arena, "min_bytes": min_bytes, "keep_on_device": keep}
    with bench.attached(**settings, **transport) as daemon:
        for form in ALL:
            yield from guarded(f"{form}, {where}", _compare(form, where, oracles))
        yield from ipc_use(bench, where, transport, daemon)


def _compare(form: Form, where: str, oracles: "Oracles") -> Iterator[Row]:
    before = disco_client.stats()
    differing, unsteady = [], []
    for variant in VARIANTS:
        task = oracles.tasks[variant]
        expected = oracles.of(form, variant)
        if expected is None:
            unsteady.append(variant.name)
            continue
        with form.around():
            for cycle in range(CYCLES):
                if not same(expected, outcome(task, form.apply, variant)):
                    differing.append(f"{variant.name}, cycle {cycle + 1}")
    stats = disco_client.stats()
    saved = stats.saved_blobs - before.saved_blobs
    read = format_size(stats.read_bytes - before.read_bytes)
    compared = len(VARIANTS) - len(unsteady)
    value = f"{compared} variants, {saved} saves, {read} read back; live {stats.live_blobs}"
    if differing:
        value = f"differ: {'; '.join(differing)}"
    ok = bool(compared and saved and not differing and not stats.live_blobs)
    yield Row(f"{form}, {where}", value, "bit-equal", ok)
    if unsteady:
        yield left_out(f"{form}, {where}, {', '.join(unsteady)}", "plain differs from itself")


class Oracles:
    """What torch's own forms compute, each once and once more for comparison."""

    def __init__(self, bench: Bench) -> None:
        shape = bench.pick(FULL, QUICK)
        self.tasks = {v: Task.make(shape, bench.device, v.dtype, v.dropout) for v in VARIANTS}
        self._known: dict[tuple[Apply, Variant], list[Tensor] | None] = {}

    def of(self, form: Form, variant: Variant) -> list[Tensor] | None:
        """The tensors to be equal to; None where torch's form does not equal itself."""
        key = form.oracle, variant
        if key not in self._known:
            one, other = (outcome(self.tasks[variant], form.oracle, variant) for _ in range(2))
            self._known[key] = one if same(one, other) else None
        return self._known[key]


def outcome(task: Task, apply: Apply, variant: Variant) -> list[Tensor]:
    """Output, gradients and random state of one step."""
    torch.manual_seed(1)
    with variant.around():
        output = task.step(apply, autocast=variant.autocast)
    on_gpu = output.device.type == "cuda"
    state = torch.cuda.get_rng_state(output.device) if on_gpu else torch.get_rng_state()
    return [output, *task.gradients(), state]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all are equal to the bit, none being missing."""
    return len(one) == len(other) and all(map(torch.equal, one, other))
