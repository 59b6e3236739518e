"""Gives the space of idle files back: steady training keeps its extents, an idle job no disk."""

import logging
import time
from functools import partial

from discod.chores import Chores
from discod.loop import Loop
from discod.tenant import File

IDLE_SECONDS = 3.0
"""Above any pause inside a training step, evaluation and checkpointing aside."""

_log = logging.getLogger(__name__)


class Trimmer:
    """Trims files that a ``Trim`` was sent for, once they have been idle long enough."""

    def __init__(self, loop: Loop, chores: Chores) -> None:
        self._loop = loop
        self._chores = chores
        self._waiting: set[File] = set()

    def idle(self, file: File) -> None:
        """``file`` is to be trimmed, and has nothing left to do."""
        if file not in self._waiting:
            self._waiting.add(file)
            self._loop.call_later(IDLE_SECONDS, partial(self._due, file))

    def _due(self, file: File) -> None:
        self._waiting.remove(file)
        if file.trim_bytes is None or file.busy:
            return  # written to, closed, or idle() will be called again
        early_seconds = file.idle_since + IDLE_SECONDS - time.monotonic()
        if early_seconds > 0:
            self._waiting.add(file)
            self._loop.call_later(early_seconds, partial(self._due, file))
            return
        trim = partial(file.scratch.trim, file.trim_bytes, file.scratch.keep())
        file.trim_bytes = None
        self._chores.submit(trim, partial(self._trimmed, file))

    def _trimmed(self, file: File, outcome: Exception | None) -> None:
        if outcome is not None:
            _log.warning("scratch %s: trim failed: %s", file.scratch.directory, outcome)
