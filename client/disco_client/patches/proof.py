"""A patch proves itself: one warning when it has moved nothing, with the reason."""

import logging
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from disco_client.tally import tally
from discod.wire.sizes import format_size

_log = logging.getLogger(__name__)


class Proof:
    """Looks, after an optimizer's first step, whether anything was offloaded since :meth:`begin`.

    An optimizer's step is what every framework does after its first backward, or around it: with a
    closure, as Lightning calls it, forward and backward run inside of the step.

    Args:
        name: The patch, for the warning.
        remedy: What to check when no call arrived at all; a sentence.
    """

    def __init__(self, name: str, remedy: str) -> None:
        self._name = name
        self._usual_remedy = self._remedy = remedy
        self._handle: RemovableHandle | None = None
        self._waiting = False
        self._calls = 0
        self._offloaded = 0

    def begin(self, remedy: str | None = None) -> None:
        """Count from here, and name ``remedy`` this time."""
        self.end()
        self._remedy = remedy or self._usual_remedy
        self._calls, self._offloaded = tally.calls, tally.offloaded
        tally.forget_reasons()
        self._waiting = True
        self._handle = register_optimizer_step_post_hook(self._look)

    def end(self) -> None:
        """Do not look any more."""
        self._waiting = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def check(self) -> None:
        """Warn, once, if nothing was offloaded; for frameworks that tell when backward is over."""
        if not self._waiting:
            return
        self._waiting = False  # the handle stays: torch is iterating over the hooks
        if tally.offloaded == self._offloaded:
            _log.warning(
                "the %s patch of discod is enabled, but nothing was offloaded by the end of the "
                "first backward: %s",
                self._name,
                self._reason(),
            )

    def _look(self, *_: Any) -> None:
        self.check()

    def _reason(self) -> str:
        if tally.calls == self._calls:
            return f"no checkpointed call reached discod. {self._remedy}"
        reasons = []
        if tally.largest_small_bytes:
            reasons.append(
                f"the largest tensor that was to be saved has "
                f"{format_size(tally.largest_small_bytes)}, and min_bytes is "
                f"{format_size(tally.its_min_bytes)}: lower that (DISCOD_MIN_BYTES, or min_bytes= "
                "of connect() or of offload(), whichever sets it)"
            )
        if tally.unsupported:
            kinds = ", ".join(sorted(tally.unsupported))
            reasons.append(f"tensors of type {kinds} cannot be kept as bytes")
        return "; ".join(reasons) or (
            "all that was saved is in memory anyway: parameters, buffers, leaves with a gradient"
        )
