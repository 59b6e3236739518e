"""What ``torch.compile`` may not trace into: locks, sockets, and hooks that hold on to tensors."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def runs_eagerly(function: _F) -> _F:
    """A graph break around ``function``; what it calls may be compiled again."""
    wrapped: _F = torch.compiler.disable(function, recursive=False)
    return wrapped
