"""One thread for calls that may be slow but are no I/O of blobs: opening, unmapping, truncating.

Freeing a large arena or file takes the kernel up to a second; on the event loop every client
would wait for it.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Chores:
    """Runs functions one after the other, and posts each outcome to the event loop.

    Args:
        post: Hands a callback to the event loop, from any thread.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="chores", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T], outcome: Callable[[T | Exception], None]) -> None:
        """Call ``function`` in the thread, then ``outcome`` on the loop with what came of it."""
        self._queue.put(partial(self._run, function, outcome))

    def stop(self) -> None:
        """End the thread after all that was submitted."""
        self._queue.put(None)
        self._thread.join()

    def _run(self, function: Callable[[], T], outcome: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = function()
        except Exception as error:  # noqa: BLE001  the outcome's to handle
            result = error
        self._post(partial(outcome, result))

    def _serve(self) -> None:
        while (chore := self._queue.get()) is not None:
            chore()
