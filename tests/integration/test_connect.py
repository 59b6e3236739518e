"""Finding a daemon, starting one, and being told clearly when there is none."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import disco_client
from disco_client import connection, launch
from tests.helpers import nursery
from tests.helpers.raw_client import RawClient

Attach = Callable[..., None]

SAVE_AND_LOAD = """
import sys, torch, disco_client
disco_client.connect({socket_dir!r}, scratch={scratch!r}, arena="4MiB")
manager = disco_client.DiskOffloadManager()
handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(12)]
ok = all(torch.equal(manager.load_tensor(h), torch.full((1 << 18,), float(i)))
         for i, h in enumerate(handles))
print(ok, flush=True)
sys.stdin.readline()
"""


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def daemons_of(socket_dir: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "discod" in command and str(socket_dir) in command:
            found.append(process)
    return found


def test_no_daemon(short_dir: Path) -> None:
    """The error comes within 3 s and names the socket and the command that starts a daemon."""
    started = time.monotonic()
    with pytest.raises(disco_client.DaemonNotRunning) as caught:
        disco_client.connect(short_dir / "none")
    assert time.monotonic() - started < 3
    assert str(short_dir / "none" / "attach.sock") in str(caught.value)
    assert "discod --scratch" in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "FileNotFoundError" not in shown, "the error would be buried under what led to it"


def test_stale_socket(daemon: Any) -> None:
    """A socket file that a killed daemon left is no daemon."""
    daemon.kill()
    assert (Path(daemon.socket_dir) / "attach.sock").exists()
    with pytest.raises(disco_client.DaemonNotRunning):
        disco_client.connect(daemon.socket_dir)


def test_attached_at_first_use_from_the_environment(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the environment is needed; sizes as people write them."""
    monkeypatch.setenv("DISCOD_SOCKET_DIR", str(daemon.socket_dir))
    monkeypatch.setenv("DISCOD_ARENA", "6MiB")
    assert disco_client.stats().arena_bytes == 0
    try:
        manager = disco_client.DiskOffloadManager()
        assert torch.equal(manager.load_tensor(manager.save_tensor(torch.ones(3))), torch.ones(3))
        assert disco_client.stats().arena_bytes == 6 << 20
        assert daemon.status()["clients"][0]["arena_bytes"] == 6 << 20
    finally:
        disco_client.close()
    wait_until(lambda: daemon.status()["clients"] == [], 5)


@pytest.mark.parametrize(
    "variable", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"]
)
def test_default_arena_is_the_ranks_share(
    start_daemon: Callable[..., Any],
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """All ranks of a node together get what the daemon has to give, and no rank more."""
    daemon = start_daemon("--ram", "64MiB", scratch=short_dir)
    monkeypatch.setenv(variable, "4")
    disco_client.connect(daemon.socket_dir)
    try:
        assert disco_client.stats().arena_bytes == 16 << 20
    finally:
        disco_client.close()


def test_a_process_by_itself_leaves_some_for_others(
    start_daemon: Callable[..., Any], short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook that is left open must not keep the next job from attaching."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(variable, raising=False)
    daemon = start_daemon("--ram", "64MiB", scratch=short_dir)
    other = RawClient(daemon.socket_dir, 16 << 20)
    try:
        disco_client.connect(daemon.socket_dir)
        assert disco_client.stats().arena_bytes == (64 - 16 << 20) // 2
    finally:
        disco_client.close()
        other.close()


def test_arena_over_the_budget(start_daemon: Callable[..., Any], short_dir: Path) -> None:
    """The daemon's --ram holds over all clients; the refusal names it."""
    daemon = start_daemon("--ram", "64MiB", scratch=short_dir)
    with pytest.raises(disco_client.AttachRefused, match="--ram"):
        disco_client.connect(daemon.socket_dir, arena="128MiB")
    assert daemon.status()["clients"] == []


def test_attaching_twice_is_an_error(attach: Attach) -> None:
    """Silently keeping the first settings would hide a mistake."""
    attach(arena="4MiB")
    with pytest.raises(disco_client.UsageError, match=r"attached already.* were not applied"):
        disco_client.connect()


def test_ranks_start_one_daemon_between_them(short_dir: Path, tmp_path: Path) -> None:
    """With scratch= and no daemon, one is started for the node; it ends after its last client."""
    code = SAVE_AND_LOAD.format(socket_dir=str(short_dir), scratch=str(tmp_path))
    ranks = [
        nursery.start(
            *("-c", code),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"LOCAL_RANK": str(rank)},
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "True\n"
        status = json.loads(
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "discod",
                    "status",
                    "--json",
                    "--socket-dir",
                    str(short_dir),
                ],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        assert {client["pid"] for client in status["clients"]} == {rank.pid for rank in ranks}
        wait_until(lambda: [p.pid for p in daemons_of(short_dir)] == [status["pid"]], 10)
    finally:
        for rank in ranks:
            rank.communicate("\n")
    wait_until(lambda: not daemons_of(short_dir), 20)
    assert os.listdir(short_dir) == []
    assert os.listdir(tmp_path) == []


@pytest.fixture
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is started here ends soon after its last client."""
    monkeypatch.setattr(launch, "EXIT_IDLE_SECONDS", 0.5)


@pytest.mark.usefixtures("short_idle")
def test_the_started_daemon_is_restarted_when_killed(short_dir: Path, tmp_path: Path) -> None:
    """A client that started its daemon starts the next one, and resumes on it."""
    disco_client.connect(short_dir, scratch=tmp_path, arena="2MiB")
    try:
        manager = disco_client.DiskOffloadManager()
        tensors = [torch.full((1 << 18,), float(i)) for i in range(6)]
        handles = [manager.save_tensor(tensor) for tensor in tensors]
        for handle in handles:
            manager.wait_for_save(handle, 10)
        (daemon,) = daemons_of(short_dir)
        daemon.kill()
        for handle, tensor in zip(handles, tensors, strict=True):
            assert torch.equal(manager.load_tensor(handle), tensor)
    finally:
        disco_client.close()
    wait_until(lambda: not daemons_of(short_dir), 20)


def test_a_daemon_that_cannot_start_says_why(short_dir: Path, tmp_path: Path) -> None:
    """The daemon's own message reaches the user of the script, within seconds."""
    started = time.monotonic()
    with pytest.raises(disco_client.DaemonNotRunning, match="missing-directory"):
        disco_client.connect(short_dir, scratch=tmp_path / "missing-directory")
    assert time.monotonic() - started < 10


def test_fork_leaves_the_parent_alone(attach: Attach, daemon: Any) -> None:
    """DataLoader workers are forked from an attached trainer: they must not disturb it."""
    attach(arena="4MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(8)]
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    manager.load_tensor(handles[0])
                except disco_client.HandleReleased as error:
                    code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(daemon.status()["clients"]) == 1
    for i, handle in enumerate(handles):
        assert torch.equal(manager.load_tensor(handle), torch.full((1 << 18,), float(i)))


def test_a_forked_child_attaches_by_itself(
    attach: Attach, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that offloads gets its own attachment, and exits normally."""
    attach(arena="4MiB")
    monkeypatch.setenv("DISCOD_SOCKET_DIR", str(daemon.socket_dir))
    monkeypatch.setenv("DISCOD_ARENA", "4MiB")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            manager = disco_client.DiskOffloadManager()
            handle = manager.save_tensor(torch.ones(1 << 18))
            code = 0 if torch.equal(manager.load_tensor(handle), torch.ones(1 << 18)) else 2
            disco_client.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert connection.current() is not None


def test_attaching_again_after_leaving_blobs_behind(
    attach_to: Callable[..., None], daemon: Any
) -> None:
    """Blobs that died with the first attachment must not come up in the second."""
    leaf = torch.randn(1 << 18, requires_grad=True)
    for _ in range(3):
        attach_to(daemon, arena="2MiB")
        hidden, kept = leaf * 1.0, []
        for _ in range(8):
            hidden = disco_client.checkpoint(torch.sin, hidden)
            kept.append(hidden)
        disco_client.close()
        with pytest.raises(disco_client.HandleReleased, match=r"detached.* is gone.*before close"):
            hidden.sum().backward()
    attach_to(daemon, arena="2MiB")
    for _ in range(3):
        leaf.grad, hidden = None, leaf * 1.0
        for _ in range(8):
            hidden = disco_client.checkpoint(torch.sin, hidden)
        hidden.sum().backward()
    assert disco_client.stats().live_blobs == 0


def test_close_while_another_thread_waits(attach: Attach, daemon: Any) -> None:
    """The waiting call ends with an error that says so, and nothing hangs or crashes."""
    attach(arena="2MiB")
    manager = disco_client.DiskOffloadManager()
    handles = [manager.save_tensor(torch.full((1 << 18,), float(i))) for i in range(6)]
    for handle in handles:
        manager.wait_for_save(handle, 10)
    errors: list[Exception] = []

    def load_all() -> None:
        try:
            for handle in handles:
                manager.load_tensor(handle)
        except disco_client.HandleReleased as error:
            errors.append(error)

    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=load_all)
        thread.start()
        session = connection.current().session
        wait_until(lambda: session._monitor._poller is not None, 10)
        disco_client.close()
        thread.join(10)
        assert not thread.is_alive()
        assert len(errors) == 1
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_threads_share_one_attachment(attach: Attach) -> None:
    """Four threads save and load at once: no mix-up, no deadlock, nothing left."""
    attach(arena="4MiB")
    failures: list[str] = []

    def work(number: int) -> None:
        manager = disco_client.DiskOffloadManager()
        for round_ in range(10):
            tensors = [torch.full((1 << 16,), float(number * 100 + round_ + i)) for i in range(8)]
            handles = [manager.save_tensor(tensor) for tensor in tensors]
            for handle, tensor in reversed(list(zip(handles, tensors, strict=True))):
                if not torch.equal(manager.load_tensor(handle), tensor):
                    failures.append(f"thread {number}, round {round_}")
                manager.cleanup_tensor(handle)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert disco_client.stats().live_blobs == 0


def test_a_tight_arena_waits_for_other_threads(attach: Attach) -> None:
    """Room that another thread's loaded tensor holds comes back: no reason to fail at once."""
    attach(arena="2MiB")
    failures: list[BaseException] = []

    def work() -> None:
        manager = disco_client.DiskOffloadManager()
        try:
            for _ in range(20):
                tensors = [torch.rand(1 << 18) for _ in range(3)]
                handles = [manager.save_tensor(tensor) for tensor in tensors]
                for handle, tensor in zip(handles, tensors, strict=True):
                    assert torch.equal(manager.load_tensor(handle), tensor)
                manager.cleanup()
        except BaseException as error:  # noqa: BLE001  told to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


@pytest.mark.usefixtures("short_idle")
def test_started_daemons_leave_no_fd_and_no_zombie(short_dir: Path, tmp_path: Path) -> None:
    """A process that attaches again and again must not collect them."""
    counts = []
    for _ in range(3):
        disco_client.connect(short_dir, scratch=tmp_path, arena="2MiB")
        disco_client.close()
        wait_until(lambda: not daemons_of(short_dir), 20)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]

    def no_zombie() -> bool:  # a process that ends has no command line some time before it is one
        launch.reap()
        return all(c.status() != psutil.STATUS_ZOMBIE for c in psutil.Process().children())

    wait_until(no_zombie, 10)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DISCOD_ARENA", "abc"),
        ("DISCOD_MIN_BYTES", "few"),
        ("LOCAL_WORLD_SIZE", "many"),
        ("DISCOD_KEEP_ON_DEVICE", "-1"),
        ("DISCOD_STAGING", "0"),
        ("DISCOD_TRANSPORT", "ipc"),
    ],
)
def test_a_malformed_variable_is_named(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Else the user does not know which of his settings is meant."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}.*{value}"):
        disco_client.connect(daemon.socket_dir)
    assert disco_client.stats().arena_bytes == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("keep_on_device", -1),
        ("keep_on_device", True),
        ("keep_on_device", 1.0),
        ("staging", 0),
        ("staging", "much"),
        ("transport", "cuda_ipc"),
    ],
)
def test_a_malformed_setting_is_named(daemon: Any, setting: str, value: object) -> None:
    """Else it would silently be another one, or the error would not say which it is."""
    settings: dict[str, Any] = {setting: value}
    with pytest.raises(ValueError, match=f"{setting}: .*{value}"):
        disco_client.connect(daemon.socket_dir, **settings)
    assert disco_client.stats().arena_bytes == 0


def test_the_daemon_of_a_rank_is_not_the_ranks_alone(
    short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the GPUs of the others, and takes no module from where the rank happens to be."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (tmp_path / "queue.py").write_text("raise SystemExit('a module of the job, not of Python')")
    monkeypatch.chdir(tmp_path)
    disco_client.connect(short_dir, scratch=tmp_path)
    try:
        (daemon,) = daemons_of(short_dir)
        environment = daemon.environ()
        assert "CUDA_VISIBLE_DEVICES" not in environment
        assert environment["PATH"] == os.environ["PATH"]
    finally:
        disco_client.close()


def test_a_misspelt_variable_is_named_once(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a setting would not be applied, in silence."""
    monkeypatch.setenv("DISCOD_AREANA", "8MiB")
    monkeypatch.setenv("DISCOD_ZZZZZZZZZ", "1")
    for _ in range(2):
        disco_client.connect(daemon.socket_dir, arena="2MiB")
        disco_client.close()
    close, far = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert close == "DISCOD_AREANA is set, and nothing reads it; did you mean DISCOD_ARENA?"
    assert far == "DISCOD_ZZZZZZZZZ is set, and nothing reads it"


def test_another_scratch_than_the_running_daemons_is_said(
    daemon: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The data goes to the other disk: the user would look for it on his."""
    for scratch in (tmp_path / "other", tmp_path / "scratch"):
        disco_client.connect(daemon.socket_dir, scratch=scratch, arena="2MiB")
        disco_client.close()
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert f"{tmp_path / 'other'} is not used" in record.message
    assert str(tmp_path / "scratch") in record.message


@pytest.mark.parametrize("timeout", ["5", -1, float("nan"), float("inf")])
def test_malformed_timeouts_are_refused(short_dir: Path, timeout: Any) -> None:
    """A timeout of another type would fail in the middle of a training."""
    with pytest.raises(ValueError, match="reconnect_timeout"):
        disco_client.connect(short_dir, reconnect_timeout=timeout)


def test_an_arena_beyond_the_address_space(daemon: Any) -> None:
    """It says what to set, as every lack of room does."""
    with pytest.raises(disco_client.ArenaFull, match="DISCOD_ARENA"):
        disco_client.connect(daemon.socket_dir, arena="99999TiB")
