"""Interrupts that a finalizer swallows: they come again, and the finalizer comes to its end."""

import sys
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest

from disco_client import interrupts
from disco_client.interrupts import End, Interrupts
from tests.helpers.daemon import eventually


class Thing:
    """Has an end."""


@pytest.fixture
def main_thread() -> Iterator[mock.Mock]:
    """Interrupted once more, when it is called."""
    with mock.patch.object(interrupts, "_thread") as module:
        yield module.interrupt_main


@pytest.fixture
def watching() -> Iterator[Interrupts]:
    watch = Interrupts()
    watch.watch()
    yield watch
    watch.leave()


def interrupted_at_once(end: End) -> End:
    """As when the signal is handled before the first line of the finalizer."""
    hook_args = mock.Mock(exc_type=KeyboardInterrupt, object=end)
    sys.unraisablehook(hook_args)
    return end


def test_it_comes_again(watching: Interrupts, main_thread: mock.Mock) -> None:
    """Ctrl-C would do nothing, and a blob never be freed."""
    done: list[int] = []
    thing = Thing()
    end = interrupted_at_once(End(thing, done.append, 1))
    assert done == [1]
    assert not end.alive
    eventually(lambda: main_thread.called)
    del thing
    assert done == [1]


def test_in_the_finalizer_itself(watching: Interrupts, main_thread: mock.Mock) -> None:
    """The same where Python really loses it, and for finalizers that are not ours."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    for kind in (End, weakref.finalize):
        thing = Thing()
        kind(thing, interrupt)
        del thing
    eventually(lambda: main_thread.call_count == 2)


def test_other_errors_are_left_to_the_hook_before(main_thread: mock.Mock) -> None:
    """Errors of anybody's finalizers would be hidden; or a hook stay behind after close()."""
    before = mock.Mock()
    with mock.patch.object(sys, "unraisablehook", before):
        watch = Interrupts()
        watch.watch()
        error = mock.Mock(exc_type=ValueError)
        sys.unraisablehook(error)
        before.assert_called_once_with(error)
        watch.leave()
        assert sys.unraisablehook is before
    assert not main_thread.called
