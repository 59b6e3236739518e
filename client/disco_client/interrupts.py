"""Ctrl-C that arrives while a finalizer runs: Python prints and forgets it; here it comes again.

A signal that came during a backward is handled at the first Python code after it, which is often
the end of a blob, or of an entry of a weak dictionary. What is raised there reaches nobody
(``sys.unraisablehook``): the training would go on. So while this process is attached, such an
interrupt is raised once more, a moment later, and an end of a blob is brought to its end before.
"""

import _thread
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

DELAY_SECONDS = 0.01
"""By then the main thread is out of the finalizer; if it is in another, it comes once more."""

_Hook = Callable[["sys.UnraisableHookArgs"], object]

if TYPE_CHECKING:
    _Finalize = weakref.finalize[..., object]
else:
    _Finalize = weakref.finalize


class End(_Finalize):
    """The end of a blob or of a loan, which an interrupt can put off but not undo."""

    __slots__ = ()


class Interrupts:
    """Passes lost interrupts on, from :meth:`watch` to :meth:`leave`."""

    def __init__(self) -> None:
        self._before: _Hook | None = None

    def watch(self) -> None:
        """Begin; what other errors of finalizers lead to stays as it is. Idempotent."""
        if sys.unraisablehook != self._hook:
            self._before = sys.unraisablehook
            sys.unraisablehook = self._hook

    def leave(self) -> None:
        """End, unless somebody else has put a hook over ours by now; idempotent."""
        if sys.unraisablehook == self._hook and self._before is not None:
            sys.unraisablehook = self._before

    def _hook(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            if isinstance(unraisable.object, End):
                unraisable.object()  # does nothing if it was done already
            again = threading.Timer(DELAY_SECONDS, _thread.interrupt_main)
            again.daemon = True
            again.start()
        elif self._before is not None:
            self._before(unraisable)
