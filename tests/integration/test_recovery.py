"""Daemons and trainers that die in the middle of a step: nothing is lost, nothing is left."""

import contextlib
import gc
import os
import signal
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import disco_client
from disco_client import connection, link
from tests.helpers.daemon import eventually, shm_entries
from tests.helpers.faults import Rules
from tests.helpers.jobs import Rank, run_job
from tests.helpers.models import GPT, plain_checkpoint
from tests.helpers.training import train

Attach = Callable[..., None]
MODEL = {"layers": 6, "width": 128, "length": 128}
HASTY = (sys.executable, str(Path(__file__).parents[1] / "helpers" / "hasty_daemon.py"))
TRAIN: dict[str, Any] = {"steps": 3, "batch": 16, "length": 128}


def run(form: Callable[..., Any], **kwargs: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return train(GPT(form, **MODEL), **TRAIN, **kwargs)


def load_all(manager: disco_client.DiskOffloadManager, handles: list[Any]) -> None:
    for handle in handles:
        manager.load_tensor(handle)


def scratch_entries(daemon: Any) -> list[str]:
    return os.listdir(daemon.scratch)


def socket_dir_entries(daemon: Any) -> set[str]:
    return set(os.listdir(daemon.socket_dir)) - {"attach.sock", "io.sock"}


@pytest.mark.parametrize("when", ["between forward and backward", "during the writes"])
def test_daemon_killed_and_started_again(
    daemon: Any, start_daemon: Callable[..., Any], attach: Attach, when: str
) -> None:
    """The step completes over a new daemon, bit-equal: both fds handed back, requests resent."""
    expected = run(plain_checkpoint)
    shm = shm_entries()
    attach(arena="2MiB", min_bytes="256KiB")
    daemons = [daemon]

    def replace(step: int) -> None:
        if when == "between forward and backward":
            deadline = time.monotonic() + 10
            while daemons[-1].status()["clients"][0]["in_flight"]:
                assert time.monotonic() < deadline, "the writes do not end"
        daemons[-1].kill()
        daemons.append(start_daemon(scratch=daemon.scratch, socket_dir=daemon.socket_dir))

    assert run(disco_client.checkpoint, after_forward=replace) == expected
    assert len(daemons) == 1 + TRAIN["steps"]
    stats = disco_client.stats()
    assert stats.live_blobs == 0
    assert stats.read_bytes > 0
    disco_client.close()
    assert scratch_entries(daemon) == []
    assert socket_dir_entries(daemon) == set()
    assert shm_entries() == shm


def test_daemon_that_comes_back_later(
    daemon: Any, start_daemon: Callable[..., Any], attach: Attach
) -> None:
    """A load that is blocked while the daemon is away goes on when a new one is there."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    tensors = [torch.full((1 << 18,), float(i)) for i in range(6)]
    handles = [manager.save_tensor(tensor) for tensor in tensors]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    daemon.kill()
    loaded: list[torch.Tensor] = []
    blocked = threading.Thread(
        target=lambda: loaded.extend(manager.load_tensor(handle).clone() for handle in handles)
    )
    blocked.start()
    start_daemon(scratch=daemon.scratch, socket_dir=daemon.socket_dir)
    blocked.join(30)
    assert len(loaded) == len(tensors)
    for got, tensor in zip(loaded, tensors, strict=True):
        assert torch.equal(got, tensor)


def test_requests_sent_while_nobody_had_noticed(
    daemon: Any, start_daemon: Callable[..., Any], attach: Attach
) -> None:
    """ZeroMQ takes them to the next daemon, which does not know us yet: they must be sent again."""
    attach(arena="8MiB")
    manager = disco_client.DiskOffloadManager()
    tensors = [torch.full((1 << 18,), float(i)) for i in range(12)]
    handles = [manager.save_tensor(tensor) for tensor in tensors[:7]]
    link = connection.current().session.link
    daemon.kill()
    # As if the call had come in the instant before the lifeline's end could be seen.
    with mock.patch.object(type(link), "check", return_value=None):
        handles.append(manager.save_tensor(tensors[7]))  # the watermark: it starts a write
        second = start_daemon(scratch=daemon.scratch, socket_dir=daemon.socket_dir)
        eventually(lambda: "I/O connection" in second.log, what="ZeroMQ's coming to the new daemon")
    handles += [manager.save_tensor(tensor) for tensor in tensors[8:]]
    for handle, tensor in zip(handles, tensors, strict=True):
        manager.wait_for_save(handle, 10)
        assert torch.equal(manager.load_tensor(handle), tensor)


def sever_io(daemon: Any) -> int:
    """Break this process's I/O connections to the daemon, and nothing else; how many."""
    broken = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.getpeername() == str(daemon.socket_dir / "io.sock"):
                one.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def test_io_connection_breaks_alone(daemon: Any, attach: Attach) -> None:
    """ZeroMQ connects again without what was in it: the trainer would wait for ever."""
    attach(arena="4MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    tensors = [torch.full((1 << 18,), float(i)) for i in range(12)]
    handles = [manager.save_tensor(tensor) for tensor in tensors]
    os.kill(daemon.pid, signal.SIGSTOP)  # so that requests are under way
    try:
        manager.trigger_prefetch()
        assert sever_io(daemon) == 1
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    began = time.monotonic()
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)
        sever_io(daemon)
    assert time.monotonic() - began < 5
    # The last one is noticed at the next call.
    eventually(lambda: disco_client.stats() and len(daemon.status()["clients"]) == 1)


@pytest.mark.parametrize("noticed", ["before close()", "by close()"])
def test_close_while_it_is_stopped_and_the_connection_broken(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None], noticed: str
) -> None:
    """It would keep the files of a trainer that has closed for as long as its process lives."""
    daemon = start_daemon()
    attach_to(daemon, arena="4MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(12)]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    assert daemon.status()["disk_used_bytes"]
    link = connection.current().session.link
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        manager.trigger_prefetch()
        sever_io(daemon)
        eventually(lambda: link._io.broken)
        if noticed == "before close()":
            disco_client.stats()
            assert link.lost
        began = time.monotonic()
        disco_client.close()
        assert time.monotonic() - began < 5
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: not daemon.status()["clients"])
    eventually(lambda: not daemon.status()["disk_used_bytes"])
    eventually(lambda: not daemon.status()["ram_used_bytes"])


def test_close_just_when_the_daemon_hangs_up(daemon: Any, attach: Attach) -> None:
    """The same where the daemon was the first to notice, and the trainer has not called since."""
    attach(arena="4MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(12)]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    sever_io(daemon)
    eventually(lambda: not daemon.status()["clients"])
    assert daemon.status()["disk_used_bytes"], "kept, since it may come back"
    disco_client.close()
    eventually(lambda: not daemon.status()["disk_used_bytes"])


def test_a_ping_does_not_wait_behind_writes(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None], tmp_path: Path
) -> None:
    """A daemon with a slow disk would be taken for a dead one, by what waits behind its queue."""
    rules = Rules(tmp_path / "rules")
    daemon = start_daemon(env=rules.environment)
    attach_to(daemon, arena="2MiB", min_bytes="4KiB", reply_timeout=0.2)
    manager = disco_client.DiskOffloadManager(save_workers=100, prefetch_size=100)
    rules.set("pwritev delay=1000")
    with mock.patch.object(link, "MOST_SENT", 2):
        tensors = [torch.full((1 << 12,), float(i)) for i in range(250)]
        saved: list[Any] = []
        saver = threading.Thread(
            target=lambda: saved.extend(manager.save_tensor(tensor) for tensor in tensors)
        )
        saver.start()
        one = connection.current().session.link
        eventually(lambda: len(one._unsent) > 0)
        pings = []
        with mock.patch.object(one, "_ping", lambda ping=one._ping: pings.append(ping())):
            # Each is sent only when the one before it was answered.
            eventually(lambda: len(pings) > 1 or not saver.is_alive())
        rules.clear()
        saver.join(20)
    assert len(saved) == len(tensors), "the save has failed"
    for handle, tensor in zip(saved, tensors, strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)


def test_daemon_that_does_not_come_back(daemon: Any, attach: Attach) -> None:
    """DaemonLost names socket and timeout, within the timeout; it is no hang."""
    attach(arena="2MiB", reconnect_timeout=0.5)
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(6)]
    daemon.kill()
    started = time.monotonic()
    with pytest.raises(disco_client.DaemonLost, match=r"reconnect_timeout") as caught:
        load_all(manager, handles)
    assert time.monotonic() - started < 5
    assert str(daemon.socket_dir) in str(caught.value)
    manager.cleanup()
    assert disco_client.stats().live_blobs == 0


def test_frozen_daemon(daemon: Any, attach: Attach) -> None:
    """SIGSTOP: an error that names the silence, and after SIGCONT the next call works."""
    attach(arena="2MiB", reply_timeout=0.3)
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(6)]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with pytest.raises(disco_client.DaemonLost, match="has not answered"):
            load_all(manager, handles)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    for i, handle in enumerate(handles):
        assert torch.equal(manager.load_tensor(handle), torch.full((1 << 18,), float(i)))


def test_trainer_killed(daemon: Any) -> None:
    """Its arena and scratch bytes are gone within 1 s; the other trainer notices nothing."""
    settings = {"model": MODEL, "train": TRAIN, "forms": ["plain"]}
    connect = {"socket_dir": str(daemon.socket_dir), "arena": "2MiB", "min_bytes": "256KiB"}
    offloaded = settings | {"forms": ["checkpoint"], "connect": connect, "pause": True}
    plain = Rank(settings)
    killed, other = Rank(offloaded, RANK="1"), Rank(offloaded, RANK="0")
    try:
        killed.wait_ready()
        other.wait_ready()
        assert {client["pid"] for client in daemon.status()["clients"]} == {killed.pid, other.pid}
        killed.kill()
        died = time.monotonic()
        while True:
            status = daemon.status()
            took = time.monotonic() - died
            if {client["pid"] for client in status["clients"]} == {other.pid}:
                break
            assert took < 1.5, "the killed trainer is still there"
        held = sum(client["disk_bytes"] for client in status["clients"])
        assert sum(scratch["used_bytes"] for scratch in status["scratch"]) == held
        other.go_on()
        report = other.report()
        assert report["history"]["checkpoint"] == plain.report()["history"]["plain"]
        assert report["live_blobs"] == 0
    finally:
        for rank in (plain, killed, other):
            rank.kill()
    assert scratch_entries(daemon) == []
    assert socket_dir_entries(daemon) == set()


def test_scratch_full(
    start_daemon: Callable[..., Any], short_dir: Path, attach_to: Callable[..., None]
) -> None:
    """A quota that is used up: a clear error, nothing lost, and the next step works."""
    daemon = start_daemon("--disk", "4MiB", scratch=short_dir)
    attach_to(daemon, arena="4MiB")
    manager = disco_client.DiskOffloadManager()
    handles: list[Any] = []
    with pytest.raises(disco_client.ScratchFull, match=r"--disk") as caught:
        handles.extend(manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(16))
    sentences = str(caught.value).split(". ")
    assert len(sentences) == 4, "in one sentence nobody finds what to set"
    assert str(short_dir) in sentences[1]
    assert 4 <= len(handles) < 16
    for i in reversed(range(len(handles))):
        assert torch.equal(manager.load_tensor(handles[i]), torch.full((1 << 18,), float(i)))
        manager.cleanup_tensor(handles[i])
    handle = manager.save_tensor(torch.ones(1 << 18))
    assert torch.equal(manager.load_tensor(handle), torch.ones(1 << 18))


def test_a_dead_daemon_does_not_matter_while_all_fits(daemon: Any) -> None:
    """Nothing on disk: the step completes without a daemon, and the exit hangs on no message."""
    connect = {"socket_dir": str(daemon.socket_dir), "arena": "64MiB", "min_bytes": "256KiB"}
    settings = {"model": MODEL, "train": TRAIN, "forms": ["checkpoint"]}
    rank = Rank(settings | {"connect": connect, "pause": True})
    try:
        rank.wait_ready()
        daemon.kill()
        rank.go_on()
        assert rank.report(timeout=60)["live_blobs"] == 0
    finally:
        rank.kill()


def test_two_ranks_over_two_scratch_directories(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    """Striping over directories changes no bit, and uses both."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    daemon = start_daemon(scratch=[first, second])
    settings = {
        "forms": ["plain", "checkpoint"],
        "model": MODEL,
        "train": TRAIN,
        "connect": {"socket_dir": str(daemon.socket_dir), "arena": "2MiB", "min_bytes": "256KiB"},
    }
    for report in run_job(2, settings):
        assert report["history"]["checkpoint"] == report["history"]["plain"]
        assert report["read_bytes"] > 0


def test_space_is_given_back_by_the_next_daemon(
    daemon: Any, start_daemon: Callable[..., Any], attach: Attach
) -> None:
    """Else an idle job whose daemon was killed before it had trimmed keeps its disk for ever."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(6)]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    manager.cleanup()
    eventually(lambda: daemon.status()["clients"][0]["in_flight"] == 0)
    assert daemon.status()["disk_used_bytes"] > 0, "it is trimmed already"
    daemon.kill()
    after = start_daemon(prefix=HASTY)

    def trimmed() -> bool:
        disco_client.stats()  # notices the new daemon
        status = after.status()
        return len(status["clients"]) == 1 and status["disk_used_bytes"] == 0

    eventually(trimmed)
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(6)]
    for i, handle in enumerate(handles):
        assert torch.equal(manager.load_tensor(handle), torch.full((1 << 18,), float(i)))


def test_a_blocked_call_looks_for_a_daemon_all_the_time(daemon: Any, attach: Attach) -> None:
    """Else it waits for nothing where others, who can do without, had found no answer in time."""
    attach(arena="2MiB")
    session_link = connection.current().session.link
    daemon.kill()
    now = 1000.0
    attempts: list[tuple[float, float]] = []

    def silent(socket_dir: Path, timeout: float) -> None:
        nonlocal now
        attempts.append((now, timeout))
        now += timeout
        raise disco_client.DaemonLost("it did not answer")

    clock = SimpleNamespace(monotonic=lambda: now)
    with mock.patch.multiple(link, time=clock, Greeting=silent):
        while now < 1030:
            session_link.check(blocked=False)  # as every call does first
            session_link.check(blocked=True)
            now += 0.01
        patient = [at for at, timeout in attempts if timeout == link.HANDSHAKE_SECONDS]
        assert len(patient) >= 8, "of 10 that there is time for"
        began, spent = now, 0.0
        while now < began + 30:
            before = now
            session_link.check(blocked=False)
            spent += now - before
            now += 0.01
        assert 0 < spent < 3, "a daemon that does not answer slows down calls that need none"


class Step:
    """Stands for all that a training step has in hand when it fails."""


def fail(call: Callable[[], object], error: type[Exception]) -> "weakref.ref[Step]":
    """Call it as a step does, which must fail; what is left of the step."""
    step = Step()
    with contextlib.suppress(error):
        call()
        raise AssertionError("it did not fail")
    return weakref.ref(step)


def test_no_error_keeps_the_step_that_it_failed(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None], tmp_path: Path
) -> None:
    """Else a graph and all its blobs stay until Python looks for cycles, or for good."""
    rules = tmp_path / "rules"
    rules.write_text("")
    daemon = start_daemon(env={"DISCOD_FAULTS": str(rules)})
    attach_to(daemon, arena="2MiB", reconnect_timeout=0.2)
    manager = disco_client.DiskOffloadManager(prefetch_size=0)
    gc.collect()
    gc.disable()
    try:
        with rules_in(rules, "pwritev EIO"):
            handles = [manager.save_tensor(torch.ones(1 << 17)) for _ in range(4)]
            left = [fail(lambda: save_all(manager, handles), disco_client.ScratchError)]
        manager.cleanup()
        del handles
        handles = [manager.save_tensor(torch.full((1 << 17,), float(i))) for i in range(8)]
        save_all(manager, handles)
        with rules_in(rules, "preadv EIO"):
            left.append(fail(lambda: load_all(manager, handles), disco_client.ScratchError))
        daemon.kill()
        left.append(fail(lambda: load_all(manager, handles), disco_client.DaemonLost))
        assert [ref() for ref in left] == [None] * 3
    finally:
        gc.enable()


def save_all(manager: disco_client.DiskOffloadManager, handles: list[Any]) -> None:
    """Wait until each is saved."""
    for handle in handles:
        manager.wait_for_save(handle, 10)


@contextlib.contextmanager
def rules_in(path: Path, rules: str) -> Iterator[None]:
    """Faults for a time."""
    path.write_text(rules)
    yield
    path.write_text("")


def test_an_idle_job_holds_no_disk(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None], tmp_path: Path
) -> None:
    """Else a job that makes no more calls keeps what its last writes were still going to."""
    rules = tmp_path / "rules"
    rules.write_text("")
    daemon = start_daemon(prefix=HASTY, env={"DISCOD_FAULTS": str(rules)})
    attach_to(daemon, arena="2MiB")
    rules.write_text("pwritev delay=60")  # until it changes
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 17,), float(i))) for i in range(4)]
    eventually(lambda: daemon.status()["disk_used_bytes"] > 0, what="a write that has begun")
    manager.cleanup()
    del handles
    rules.write_text("")
    eventually(lambda: daemon.status()["disk_used_bytes"] == 0)
