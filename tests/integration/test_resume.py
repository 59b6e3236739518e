"""Daemons that die, or are slow, at the worst moment of a client's coming back."""

import contextlib
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import disco_client
from disco_client import connection, link
from discod.wire.fds import send_message
from discod.wire.messages import Attach, Done
from tests.helpers.raw_client import MIB, greet

AttachThis = Callable[..., None]


class Local:
    """Something that a caller has in a variable, as a trainer has tensors."""


def kept(call: Callable[[], object]) -> object:
    """What is left of a local variable of a function that called ``call``, which may raise."""

    def step() -> "weakref.ref[Local]":
        local = Local()
        with contextlib.suppress(disco_client.DiscodError):
            call()
        return weakref.ref(local)

    return step()()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What is freed is freed by its last reference, as a step's activations must be."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_error_keeps_nothing_of_the_caller(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None], tmp_path: Path
) -> None:
    """A failed step frees its activations at once, or the one that is tried next has no room.

    Errors that are kept for later, or that a frame which raised them still names, keep with their
    traceback every variable of every caller: until a garbage collection, or for as long as the
    blob lives.
    """
    faults = tmp_path / "faults"
    faults.write_text("")
    daemon = start_daemon(env={"DISCOD_FAULTS": str(faults)})
    attach_to(daemon, arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(4)]
    for handle in handles:
        manager.wait_for_save(handle, 20)
    faults.write_text("preadv EIO")
    with pytest.raises(disco_client.ScratchError):
        manager.load_tensor(handles[0])
    assert kept(lambda: manager.load_tensor(handles[0])) is None
    faults.write_text("pwritev EIO")
    manager.cleanup()
    handles = [manager.save_tensor(torch.zeros(1 << 18)) for _ in range(2)]
    with pytest.raises(disco_client.ScratchError):
        manager.wait_for_save(handles[0], 20)
    assert kept(lambda: manager.wait_for_save(handles[0], 20)) is None


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_daemon_that_is_away_keeps_nothing_of_the_caller(daemon: Any, attach: AttachThis) -> None:
    """While no daemon is there, what a step has let go of is freed: why it is away is kept."""
    attach(arena="2MiB", reconnect_timeout=0)
    link = connection.current().session.link
    daemon.kill()

    def attempt() -> None:
        link._next_attempt = 0.0
        link.check(blocked=True)

    assert kept(attempt) is None
    assert link.lost


def test_a_resume_that_is_answered_too_late(
    daemon: Any, start_daemon: Callable[..., Any], raw_client: Callable[..., Any]
) -> None:
    """A client that gave up waiting for a frozen daemon finds its data at the next attempt.

    The daemon, thawed, must neither take its hanging up for its end, and empty the files, nor
    refuse the next attempt because it holds the files for the one before.
    """
    client = raw_client(daemon)
    client.arena[: 4 * MIB] = bytes(range(256)) * (4 * MIB // 256)
    written = client.write(0, 0, 4 * MIB)
    client.arena[: 4 * MIB] = bytes(4 * MIB)
    daemon.kill()
    client.detach()
    again = start_daemon(scratch=daemon.scratch, socket_dir=daemon.socket_dir)
    for _ in range(5):
        lifeline, _ = greet(daemon.socket_dir)
        os.kill(again.pid, signal.SIGSTOP)
        try:
            attach = Attach(client.arena_bytes, -1, "test", resume=True)
            send_message(lifeline, attach, [client.arena_fd, *client.files])
            lifeline.close()
        finally:
            os.kill(again.pid, signal.SIGCONT)
        client.attach(daemon.socket_dir)
        assert isinstance(client.read(0, 0, 4 * MIB, written.checksum), Done)
        assert client.arena[: 4 * MIB] == bytes(range(256)) * (4 * MIB // 256)
        client.arena[: 4 * MIB] = bytes(4 * MIB)
        client.detach()


STRICT = """
import sys
from discod import tenant
from discod.cli import main
tenant.MAX_UNANSWERED = 8
main(sys.argv[4:])
"""


def test_more_requests_than_the_daemon_takes_at_a_time(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None]
) -> None:
    """Tens of thousands of small tensors would be refused, each as if its disk had failed."""
    prefix = (sys.executable, "-c", STRICT)
    daemon = start_daemon(prefix=prefix)
    attach_to(daemon, arena="2MiB", min_bytes="4KiB")
    with mock.patch.object(link, "MOST_SENT", 6):
        manager = disco_client.DiskOffloadManager(save_workers=100, prefetch_size=100)
        tensors = [torch.full((1 << 12,), float(i)) for i in range(250)]
        handles = [manager.save_tensor(tensor) for tensor in tensors]
        daemon.kill()
        again = start_daemon(prefix=prefix, scratch=daemon.scratch, socket_dir=daemon.socket_dir)
        for handle, tensor in zip(handles, tensors, strict=True):
            assert torch.equal(manager.load_tensor(handle), tensor)
        for handle in handles:
            manager.wait_for_save(handle, 10)  # raises if a write was refused
    assert disco_client.stats().read_bytes > 0
    assert "refused" not in daemon.log + again.log
