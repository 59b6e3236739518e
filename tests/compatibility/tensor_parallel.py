"""Rows under tensor parallelism: a layer's matrices are divided between the ranks."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

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


def _mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _blocks() -> list[Any]:
    return [Block(dropout=0) for _ in range(3)]  # DTensor has no random numbers on the CPU


def plain_hidden(call: Call) -> Net:
    """Every rank has all hidden states, as plain tensors."""
    net = Net(call, _blocks())
    for block in net.blocks:
        parallelize_module(block, _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


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
ROWS = [
    Row(
        TABLE,
        "plain hidden states",
        "columnwise, rowwise",
        plain_hidden,
        one_backward,
        same_data=True,
    ),
    Row(
        TABLE,
        "`DTensor` hidden states",
        "sequence parallel",
        divided_hidden,
        one_backward,
        same_data=True,
        in_memory=True,
    ),
]
