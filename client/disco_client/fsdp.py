"""What FSDP2 gets wrong with the reentrant form, so that ``Disco`` can refuse it.

Nothing else here knows FSDP2: ``checkpoint()`` works with it as torch's own does.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from disco_client.errors import UnsupportedCall
from disco_client.inplace import name_of

_last_backward: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""The backward in which a module was last recomputed, by autograd's number for it."""


def refuse_second_recomputation(function: Callable[..., Any]) -> None:
    """Call in backward, before a reentrant form recomputes ``function``.

    The first recomputation of a module that is sharded with ``fully_shard`` leaves it in the state
    of a backward until the whole backward ends. In the second one FSDP2 therefore runs no hooks:
    the gradients of this call are not reduced, and the parameters are not sharded again.

    The module is found when ``function`` is it, its bound ``__call__`` or a partial of either.
    Inside of other functions it is not.

    Raises:
        UnsupportedCall: A sharded module was recomputed in this very backward already.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    module = _module_of(function)
    if fsdp is None or module is None:
        return
    backward = torch._C._current_graph_task_id()
    for part in module.modules():
        if not isinstance(part, fsdp.FSDPModule):
            continue
        if _last_backward.get(part) == backward:
            raise UnsupportedCall(
                f"{name_of(part)} is sharded by FSDP2 and ran more than once before this "
                "backward, in calls of Disco: FSDP2 would neither reduce all of its gradients nor "
                "shard its parameters again. Use disco_client.checkpoint, which can do this, or "
                "call backward after every forward"
            )
        _last_backward[part] = backward


def _module_of(function: Any) -> torch.nn.Module | None:
    """The module whose ``__call__``, and with it its hooks, ``function`` runs."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        owner = function.__self__
        calls = (type(owner).__call__, torch.nn.Module.__call__)
        return owner if function.__func__ in calls and isinstance(owner, torch.nn.Module) else None
    return function if isinstance(function, torch.nn.Module) else None
