"""The columns: each way to run a layer, and what it claims to be equal to."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import disco_client
from tests.helpers.models import plain_checkpoint, reentrant_checkpoint

Call = Callable[..., Any]


@dataclass(frozen=True)
class Form:
    """One way to run the layers of a model.

    Attributes:
        name: Its name in the tables.
        usage: How it is called, as the page says it.
        call: ``call(layer, hidden)`` runs one layer.
        claims: The form whose results it must have; None for the one that all are held against.
        recomputes: Whether backward runs the layers again.
        around: What the forward of the whole model runs in.
        ours: Whether it is discod's, and so must save blobs and never be silently different.
    """

    name: str
    usage: str
    call: Call
    claims: str | None
    recomputes: bool = True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ours: bool = False


def call_layer(layer: Call, *args: Any) -> Any:
    """Without any checkpointing."""
    return layer(*args)


PLAIN = "no checkpoint"
NON_REENTRANT = "torch, non-reentrant"
REENTRANT = "torch, reentrant"


_TORCH = "torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant={})"


FORMS = [
    Form(PLAIN, "layer(hidden)", call_layer, claims=None, recomputes=False),
    Form(NON_REENTRANT, _TORCH.format(False), plain_checkpoint, claims=PLAIN),
    Form(
        "`checkpoint`",
        "disco_client.checkpoint(layer, hidden)",
        disco_client.checkpoint,
        claims=NON_REENTRANT,
        ours=True,
    ),
    Form(REENTRANT, _TORCH.format(True), reentrant_checkpoint, claims=PLAIN),
    Form(
        "`Disco`",
        "disco_client.Disco.apply(layer, hidden)",
        disco_client.Disco.apply,
        claims=REENTRANT,
        ours=True,
    ),
    Form(
        "`offload`",
        "with disco_client.offload(): ...",
        call_layer,
        claims=PLAIN,
        recomputes=False,
        around=disco_client.offload,
        ours=True,
    ),
]
"""In the order of the columns; what a form claims stands before it."""
