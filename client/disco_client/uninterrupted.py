"""What must come to its end although a signal arrives: opening and closing of what has fds.

Python runs signal handlers in the main thread alone, between any two instructions, and what they
raise would lose an fd that a system call has just returned. A signal also ends libzmq's
``zmq_ctx_term``, after which pyzmq has forgotten the context, with its threads and fds. So such
things run in a short-lived thread that blocks all signals. They end by themselves, in bounded time.
"""

import _thread
import signal
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Task(Generic[_T]):
    """A function that was begun, and comes to its end; one of them runs at a time.

    Args:
        function: What to call.
    """

    _turn = _thread.allocate_lock()

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._value: _T | None = None
        self._error: BaseException | None = None
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no more threads, or at exit from Python 3.12 on
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._call()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self) -> _T:
        """What the function gives, or raises. What a signal handler raises ends the wait alone."""
        with self._ended:
            pass
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # of type _T, once it has ended

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._call()

    def _call(self) -> None:
        try:
            with Task._turn:
                self._value = self._function()
        except BaseException as error:  # noqa: BLE001  of whoever waits
            self._error = error
        finally:
            self._ended.release()

    @classmethod
    def after_fork(cls) -> None:
        """In a forked child, where no other thread is: nobody has the turn."""
        cls._turn = _thread.allocate_lock()


def to_its_end(function: Callable[[], _T]) -> _T:
    """Call ``function``, and wait for its end also when a signal handler raises meanwhile.

    That is raised then. A second one may end the wait, but not the function.
    """
    task = Task(function)
    try:
        return task.wait()
    except BaseException:
        task.wait()
        raise
