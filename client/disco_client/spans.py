"""Spans of saves, loads and waits in ``torch.profiler``, while a profiler is active.

Callers ask :func:`profiling` first, so that without one nothing more is done. What the daemon does
meanwhile is in ``discod trace``.
"""

from torch.autograd import profiler
from torch.profiler import record_function

SAVE = "discod::save"
LOAD = "discod::load"
WAIT = "discod::wait"
"""Inside of a save: for room in the arena, or for copies off a device. Inside of a load: for a
read."""

__all__ = ["LOAD", "SAVE", "WAIT", "profiling", "record_function"]


def profiling() -> bool:
    """Whether a profiler is active in this process, in whichever thread."""
    return profiler._is_profiler_enabled
