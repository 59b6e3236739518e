"""The event loop: order of timers, callbacks from other threads, fds that come and go."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from discod.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop that stops after 10 s whatever happens."""
    loop = Loop()
    loop.call_later(10, loop.stop)
    yield loop
    loop.close()


def run(loop: Loop) -> int:
    """Run until something stops the loop; returns the number of rounds."""
    rounds = 0

    def count() -> bool:
        nonlocal rounds
        rounds += 1
        return False

    loop.run(count)
    return rounds


def test_timers(loop: Loop) -> None:
    """Time limits would end in the wrong order, early, or although they were cancelled."""
    order: list[str] = []
    began = time.monotonic()
    loop.call_later(0.04, loop.stop)
    for name, seconds in (("c", 0.03), ("a", 0.01), ("x", 0.005), ("b", 0.01)):
        timer = loop.call_later(seconds, lambda name=name: order.append(name))  # type: ignore[misc]  # the loop's variable
        if name == "x":
            timer.cancel()
    rounds = run(loop)
    assert order == ["a", "b", "c"]
    assert time.monotonic() - began >= 0.04
    assert rounds <= 5, "it woke up for a cancelled timer, or polled"


def test_post_from_threads(loop: Loop) -> None:
    """An ended job would go unnoticed until something else happens."""
    got: list[int] = []

    def done(number: int) -> None:
        got.append(number)
        if len(got) == 400:
            loop.stop()

    def post() -> None:
        for i in range(100):
            loop.post(lambda i=i: done(i))  # type: ignore[misc]  # the loop's variable

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    run(loop)
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted([*range(100)] * 4)


def test_more_is_asked_until_there_is_none(loop: Loop) -> None:
    """Messages would lie in the socket until the next one comes."""
    left = [True, True, False]

    def more() -> bool:
        answer = left.pop(0)
        if not left:
            loop.stop()
        return answer

    loop.run(more)
    assert left == []


def test_an_fd_number_that_is_used_again(loop: Loop) -> None:
    """A new client would be ended because of what happened to the one before it."""
    calls: list[str] = []
    ends = [os.pipe() for _ in range(3)]

    def first() -> None:
        # Both are readable; the handler of one closes the other, whose number is reused at once.
        calls.append("first")
        for number, (read, _) in enumerate(ends[:2]):
            if calls == ["first"]:
                loop.remove_reader(read)
                os.dup2(ends[2][0], read)
                loop.add_reader(read, lambda number=number: calls.append(f"new {number}"))  # type: ignore[misc]  # the loop's variable
        loop.call_later(0.02, loop.stop)

    for read, write in ends[:2]:
        os.write(write, b"x")
        loop.add_reader(read, first)
    run(loop)
    assert calls == ["first"]
    for read, write in ends:
        os.close(read)
        os.close(write)
