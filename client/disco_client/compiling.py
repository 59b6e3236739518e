"""What ``torch.compile`` may not trace into: locks, sockets, and hooks that hold on to tensors."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def runs_eagerly(function: _F) -> _F:
    """A graph break around ``function`` and all that it calls, as torch's own checkpoint has it.

    A layer that is compiled by itself, ``checkpoint(torch.compile(layer), ...)``, stays so.
    """
    wrapped: _F = torch.compiler.disable(function)
    return wrapped
