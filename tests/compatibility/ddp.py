"""Rows under ``DistributedDataParallel``."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.compatibility import models
from tests.compatibility.forms import Call
from tests.compatibility.rows import Row, Step, accumulate_in_ddp, one_backward, two_forwards

SETTINGS: dict[str, dict[str, bool]] = {
    "default": {},
    "`find_unused_parameters`": {"find_unused_parameters": True},
    "`static_graph`": {"static_graph": True},
}


def wrapped(build: Callable[[Call], nn.Module], options: dict[str, bool]) -> Any:
    """``build`` and then DDP."""
    return lambda call: DistributedDataParallel(build(call), **options)


def _rows(name: str, build: Callable[[Call], nn.Module], step: Step = one_backward) -> list[Row]:
    return [
        Row("DDP", name, setting, wrapped(build, options), step, same_gradients=True)
        for setting, options in SETTINGS.items()
    ]


ROWS = [
    *_rows("each layer once", models.plain),
    *_rows("a layer used twice", models.shared),
    *_rows("an unused parameter", models.unused),
    *_rows("two forwards, then backward", models.plain, two_forwards),
    *_rows("accumulation with `no_sync`", models.plain, accumulate_in_ddp),
    *_rows("LoRA on a frozen base", models.frozen_with_grad),
    *_rows("the same, hidden states without grad", models.frozen),
]
