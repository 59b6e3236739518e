"""Changes in place: autograd's own check, for what the hooks take out of its sight."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disco_client.errors import UnsupportedCall


class InputGuard:
    """Notices a function that changes its offloaded inputs in place.

    The copy has the values from before the call, while autograd without hooks would refuse the
    changed tensor in backward; so the call is refused at once.
    """

    def __init__(self, inputs: Sequence[object]) -> None:
        self._inputs = inputs
        self._versions = [version_of(value) for value in inputs]

    def refuse_changes(
        self, offloads: Callable[[object], bool], function: Callable[..., Any]
    ) -> None:
        """Raise :class:`UnsupportedCall` when an offloaded input has changed since the start."""
        for position, (value, version) in enumerate(zip(self._inputs, self._versions, strict=True)):
            if version_of(value) != version and offloads(value):
                raise UnsupportedCall(
                    f"input {position} of {name_of(function)} was modified by an inplace "
                    "operation inside it: the recomputation in backward would start from "
                    "other values. Make the operation out of place, or clone the input first"
                )


def refuse_stale(tensor: torch.Tensor, version: int) -> None:
    """Raise as autograd does when ``tensor`` is not at ``version`` any more."""
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a saved {tuple(tensor.shape)} tensor is at version "
            f"{version_of(tensor)}; expected version {version} instead"
        )


def version_of(value: object) -> int:
    """The in-place version of a tensor; -1 for what has none."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return -1
    return value._version


def name_of(function: Callable[..., Any]) -> str:
    """The function's or module's name, for messages."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name
