"""Rows under tensor parallelism: a layer's matrices are divided between the ranks."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from tests.compatibility.forms import Call
from tests.compatibility.models import Block, Net
from tests.compatibility.rows import Row, one_backward


class SequenceParallelNet(Net):
    """Hidden states are DTensors, divided along the sequence, from layer to layer."""

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = super().enter(inputs)
        return DTensor.from_local(hidden, _mesh(), run_check=False).redistribute(
            placements=[Shard(1)]
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(hidden.full_tensor())


class LateBlock(Block):
    """A layer without residual, so that its output is a collective that may still be running.

    Rank 1 joins it late, and rank 0 is in the next layer before its input is there.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = functional.gelu(self.up(self.norm(hidden)))
        if torch.distributed.get_rank() == 1:
            time.sleep(LATE_SECONDS)
        output: torch.Tensor = self.down(wide)
        return output


LATE_SECONDS = 0.02
"""A copy that does not wait for the collective takes microseconds."""


def _mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _blocks(kind: type[Block] = Block) -> list[nn.Module]:
    return [kind(dropout=0) for _ in range(3)]  # DTensor has no random numbers on the CPU


def _divided_columns_and_rows(call: Call, blocks: list[nn.Module]) -> Net:
    for block in blocks:
        parallelize_module(block, _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Net(call, blocks)


def plain_hidden(call: Call) -> Net:
    """Every rank has all hidden states, as plain tensors."""
    return _divided_columns_and_rows(call, _blocks())


def unfinished_hidden(call: Call) -> Net:
    """The same, and a layer's input is the result of a collective that nobody has waited for."""
    return _divided_columns_and_rows(call, _blocks(LateBlock))


def divided_hidden(call: Call) -> Net:
    """Every rank has a part of the sequence, as a DTensor."""
    net = SequenceParallelNet(call, _blocks())
    for block in net.blocks:
        parallelize_module(
            block,
            _mesh(),
            {
                "norm": SequenceParallel(use_local_output=False),
                "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )
    return net


TABLE = "Tensor parallel"


def _row(hidden: str, setting: str, build: Callable[[Call], nn.Module]) -> Row:
    return Row(TABLE, hidden, setting, build, one_backward, same_data=True)


ROWS = [
    _row("plain hidden states", "columnwise, rowwise", plain_hidden),
    _row("unfinished hidden states", "columnwise, rowwise", unfinished_hidden),
    _row("`DTensor` hidden states", "sequence parallel", divided_hidden),
]
