"""Under a service manager: sockets that outlive the daemon, its state told, its loop watched."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import disco_client
from discod.exits import Exit
from tests.helpers.manager import Manager, files, listening

StartDaemon = Callable[..., Any]


@pytest.fixture
def manager(short_dir: Path) -> Iterator[Manager]:
    """A service manager with the daemon's sockets."""
    manager = Manager(short_dir)
    yield manager
    manager.close()


def test_sockets_outlive_the_daemon(
    manager: Manager, start_daemon: StartDaemon, attach_to: Callable[..., None]
) -> None:
    """A restart would lose what clients have on disk, or new clients would find no socket."""
    before = files(manager.directory)
    daemon = start_daemon(**manager.options)
    attach_to(daemon, arena="4MiB", min_bytes="256KiB")
    store = disco_client.DiskOffloadManager()
    tensors = [torch.randn(1 << 18) for _ in range(8)]
    handles = [store.save_tensor(tensor) for tensor in tensors]
    for end in ("kill", "terminate"):
        getattr(daemon, end)()
        daemon.wait()
        assert files(manager.directory) == before
        daemon = start_daemon(scratch=daemon.scratch, **manager.options)
        for handle, tensor in zip(handles, tensors, strict=True):
            assert torch.equal(store.load_tensor(handle), tensor)
        assert daemon.status()["clients"][0]["pid"] == os.getpid()


def test_a_client_waits_in_the_queue_for_the_next_daemon(
    manager: Manager, start_daemon: StartDaemon
) -> None:
    """A trainer that starts while the daemon restarts would fail."""
    attached = threading.Event()

    def attach() -> None:
        disco_client.connect(manager.directory, arena="4MiB")
        attached.set()

    client = threading.Thread(target=attach)
    client.start()
    try:
        manager.somebody_connects()
        start_daemon(**manager.options)
        client.join()
        assert attached.is_set()
    finally:
        disco_client.close()


def test_it_tells_of_its_life(
    manager: Manager, start_daemon: StartDaemon, attach_to: Callable[..., None]
) -> None:
    """Units that wait for it would start too early, or never; 'systemctl status' says nothing."""
    daemon = start_daemon(**manager.options)
    assert manager.said() == ["READY=1", "STATUS=no clients"]
    attach_to(daemon, arena="4MiB")
    manager.heard("STATUS=1 client")
    daemon.terminate()
    manager.heard("STOPPING=1")
    assert daemon.wait() == Exit.OK


def test_the_watchdog_is_fed_by_the_loop(manager: Manager, start_daemon: StartDaemon) -> None:
    """A daemon whose loop is stuck would not be restarted, or one that works would be."""
    options = manager.options
    options["env"] |= {"WATCHDOG_USEC": "200000"}
    daemon = start_daemon(**options)
    for _ in range(3):
        manager.heard("WATCHDOG=1")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            manager.silence(0.6)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    manager.heard("WATCHDOG=1")


def test_a_watchdog_of_another_process(manager: Manager, start_daemon: StartDaemon) -> None:
    """A daemon started by a service's process would answer for that service."""
    options = manager.options
    options["env"] |= {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    daemon = start_daemon(**options)
    daemon.terminate()
    while "STOPPING=1" not in (said := manager.said()):
        assert "WATCHDOG=1" not in said


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ([socket.SOCK_SEQPACKET], ["attach.sock"]),
        ([socket.SOCK_STREAM, socket.SOCK_SEQPACKET], ["attach.sock", "io.sock"]),
        ([socket.SOCK_SEQPACKET, socket.SOCK_STREAM], ["attach.sock", "other.sock"]),
    ],
)
def test_other_sockets_are_refused(
    short_dir: Path, start_daemon: StartDaemon, kinds: list[int], names: list[str]
) -> None:
    """A unit with a slip of the pen would give a daemon that nobody can reach."""
    sockets = [listening(k, short_dir / name) for k, name in zip(kinds, names, strict=True)]
    manager = Manager(short_dir, sockets)
    daemon = start_daemon(ready=False, **manager.options)
    assert daemon.wait() == Exit.ACTIVATION_UNUSABLE
    assert "ListenSequentialPacket=" in daemon.log
    assert all((short_dir / name).exists() for name in names)
    manager.close()


def test_an_fd_that_is_no_socket(short_dir: Path, start_daemon: StartDaemon) -> None:
    """The daemon would end with a traceback that names nothing."""
    manager = Manager(short_dir, [])
    with open(os.devnull, "rb") as other:
        options = manager.options | {"pass_fds": [other.fileno()]}
        options["prefix"][-1] = str(other.fileno())
        daemon = start_daemon(ready=False, **options)
        assert daemon.wait() == Exit.ACTIVATION_UNUSABLE
    assert "fd 3" in daemon.log
    manager.close()


def test_an_abstract_socket(short_dir: Path, start_daemon: StartDaemon) -> None:
    """Service managers in containers use those."""
    name = f"discod-test-{os.getpid()}-{short_dir.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(f"\0{name}")
        notified.settimeout(20)
        start_daemon(env={"NOTIFY_SOCKET": f"@{name}"})
        assert notified.recv(100).startswith(b"READY=1\n")


@pytest.mark.parametrize("address", ["/nowhere/notify.sock", "relative", "@gone", ""])
def test_nobody_listens(start_daemon: StartDaemon, address: str) -> None:
    """A daemon would fail because of the one who only watches it."""
    daemon = start_daemon(env={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "nonsense"})
    daemon.terminate()
    assert daemon.wait() == Exit.OK
