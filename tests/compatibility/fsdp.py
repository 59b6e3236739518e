"""Rows under FSDP2: ``fully_shard`` on every layer, then on the whole model."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.compatibility import models
from tests.compatibility.forms import Call
from tests.compatibility.rows import Row, Step, accumulate_in_fsdp, one_backward, two_forwards

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def shard(model: models.Net, **options: Any) -> models.Net:
    """As users do it; with ``options`` of ``fully_shard``."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _row(
    name: str,
    setting: str,
    build: Callable[[Call], models.Net],
    step: Step = one_backward,
    **options: Any,
) -> Row:
    return Row(
        "FSDP2", name, setting, lambda call: shard(build(call), **options), step, sharded=True
    )


ROWS = [
    _row("each layer once", "default", models.plain),
    _row("each layer once", "bfloat16 parameters", models.plain, mp_policy=BFLOAT16),
    _row(
        "each layer once",
        "`reshard_after_forward=False`",
        models.plain,
        reshard_after_forward=False,
    ),
    _row("a layer used twice", "default", models.shared),
    _row("an unused parameter", "default", models.unused),
    _row("two forwards, then backward", "default", models.plain, two_forwards),
    _row("accumulation without reduction", "default", models.plain, accumulate_in_fsdp),
    _row("LoRA on a frozen base", "default", models.frozen_with_grad),
    _row(
        "LoRA on a frozen base", "bfloat16 parameters", models.frozen_with_grad, mp_policy=BFLOAT16
    ),
    _row("the same, hidden states without grad", "default", models.frozen),
]
