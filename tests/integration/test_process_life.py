"""Faults around a process: other releases, clocks that jump, small limits, silence, Ctrl-C."""

import ast
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import disco_client
from discod.wire import PROTOCOL_VERSION
from tests.helpers import nursery
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.jobs import ROOT

Attach = Callable[..., None]
OTHER_VERSION = str(ROOT / "tests/helpers/other_version.py")
TENSORS = [torch.full((1 << 18,), float(i)) for i in range(12)]


def save_all(manager: disco_client.DiskOffloadManager) -> list[Any]:
    """Three times the arena of 4 MiB."""
    return [manager.save_tensor(tensor) for tensor in TENSORS]


def load_all(manager: disco_client.DiskOffloadManager, handles: list[Any]) -> None:
    for handle, tensor in zip(handles, TENSORS, strict=True):
        assert torch.equal(manager.load_tensor(handle), tensor)


def wait_all(manager: disco_client.DiskOffloadManager, handles: list[Any], timeout: float) -> None:
    for handle in handles:
        manager.wait_for_save(handle, timeout=timeout)


class TestVersions:
    def test_newer_daemon_of_the_same_protocol(
        self, daemon: Daemon, start_daemon: Callable[..., Daemon], attach: Attach
    ) -> None:
        """An upgrade of the daemon would have to wait for every job."""
        attach(arena="4MiB", min_bytes="4KiB")
        manager = disco_client.DiskOffloadManager()
        handles = save_all(manager)
        daemon.terminate()
        assert daemon.wait() == 0
        newer = [sys.executable, OTHER_VERSION, "99.1", str(PROTOCOL_VERSION)]
        second = start_daemon(prefix=newer)
        assert second.status()["version"] == "99.1"
        load_all(manager, handles)
        assert len(second.status()["clients"]) == 1

    def test_another_protocol_at_resume_and_at_attach(
        self, daemon: Daemon, start_daemon: Callable[..., Daemon], attach: Attach
    ) -> None:
        """The trainer would wait for a minute, or misunderstand; the error names both versions."""
        attach(arena="4MiB", min_bytes="4KiB")
        manager = disco_client.DiskOffloadManager()
        handles = save_all(manager)
        daemon.kill()
        other = start_daemon(prefix=[sys.executable, OTHER_VERSION, "99.2", "77"], ready=False)
        eventually(lambda: "serves" in other.log, 20)
        for what in (
            lambda: load_all(manager, handles),
            lambda: disco_client.connect(other.socket_dir),
        ):
            began = time.monotonic()
            with pytest.raises(disco_client.DaemonError) as raised:
                what()
            assert time.monotonic() - began < 3
            assert all(word in str(raised.value) for word in ("99.2", "77", str(PROTOCOL_VERSION)))
            disco_client.close()


class TestClock:
    def test_nobody_asks_for_the_wall_clock(self) -> None:
        """A jump of the clock would end waits that go on, or make them last for hours.

        Only a trace says what time it is, for the profiles that it lies beside.
        """
        traces = {ROOT / "discod/trace.py", ROOT / "discod/commands/trace.py"}
        forbidden = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}
        for path in [*(ROOT / "discod").rglob("*.py"), *(ROOT / "client").rglob("*.py")]:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    of_the_clock = node.value.id in ("time", "datetime", "date")
                    asked = node.attr in forbidden and path not in traces
                    assert not (of_the_clock and asked), f"{path}:{node.lineno}"
                if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                    raise AssertionError(f"{path}:{node.lineno} hides what it asks for")

    def test_jumps_of_an_hour(self, attach: Attach) -> None:
        """The trainer would take its daemon for dead, or wait for it without end."""
        attach(arena="4MiB", min_bytes="4KiB")
        manager = disco_client.DiskOffloadManager()
        real = time.time
        for jump in (3600, -3600):
            with mock.patch.object(time, "time", lambda jump=jump: real() + jump):
                handles = save_all(manager)
                manager.wait_for_save(handles[0], timeout=10)
            load_all(manager, handles)


class TestTimeouts:
    def test_wait_for_save_that_is_not_over(self, daemon: Daemon, attach: Attach) -> None:
        """It would return as if the tensor were saved."""
        attach(arena="4MiB", min_bytes="4KiB")
        manager = disco_client.DiskOffloadManager()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            handles = [manager.save_tensor(tensor) for tensor in TENSORS[:4]]
            began = time.monotonic()
            with pytest.raises(TimeoutError) as raised:
                wait_all(manager, handles, 0.2)
            assert 0.2 <= time.monotonic() - began < 2
            assert "0.2 s" in str(raised.value)
            assert any(str(handle) in str(raised.value) for handle in handles)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        for handle, tensor in zip(handles, TENSORS, strict=False):
            manager.wait_for_save(handle, timeout=10)
            assert torch.equal(manager.load_tensor(handle), tensor)


class TestLogs:
    def test_a_daemon_that_stays_away(
        self, daemon: Daemon, attach: Attach, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A line for each of thousands of calls would bury the one that says what is wrong."""
        attach(arena="64MiB", min_bytes="4KiB")
        manager = disco_client.DiskOffloadManager()
        handles = [manager.save_tensor(TENSORS[0])]
        daemon.kill()
        with caplog.at_level(logging.WARNING):
            ends = time.monotonic() + 1.5
            while time.monotonic() < ends:
                manager.cleanup_tensor(handles.pop())
                handles.append(manager.save_tensor(TENSORS[1]))
        assert [record.message.count("hung up") for record in caplog.records] == [1]

    def test_a_daemon_says_each_kind_once_in_a_while(
        self, daemon: Daemon, raw_client: Callable[..., Any]
    ) -> None:
        """A broken client would fill the daemon's log, and the disk."""
        client = raw_client(daemon)
        before = len(daemon.log.splitlines())
        stranger = client.connect(daemon.socket_dir, b"\x01" + bytes(15))
        for _ in range(200):
            stranger.send(b"garbage")
        client.write(0, 0, 4096)
        stranger.close(linger=0)
        for _ in range(20):
            client.read(1 << 40, 0, 4096)  # beyond the end of the file
        assert len(daemon.log.splitlines()) - before <= 2


SMALL = """
import os, random, resource, sys
import torch, disco_client
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
saves, live = int(sys.argv[2]), int(sys.argv[3])
disco_client.connect(sys.argv[1], arena=sys.argv[4], min_bytes=1)
manager = disco_client.DiskOffloadManager()
chance = random.Random(0)
held = []
def count():
    maps = open("/proc/self/maps").read()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:discod")
for number in range(saves):
    tensor = torch.full((chance.randint(1, 1024),), float(number))
    held.append((number, tensor.numel(), manager.save_tensor(tensor)))
    if number == live:
        first = count()
    if len(held) > live:
        expected, size, handle = held.pop(chance.randrange(len(held)))
        loaded = manager.load_tensor(handle)
        assert loaded.numel() == size and bool((loaded == expected).all()), expected
        manager.cleanup_tensor(handle)
for expected, size, handle in held:
    loaded = manager.load_tensor(handle)
    assert loaded.numel() == size and bool((loaded == expected).all()), expected
stats = disco_client.stats()
assert stats.written_bytes > 0 and stats.read_bytes > 0, stats
last = count()
assert last == first, (first, last)
print(stats.saved_blobs, *last)
"""


LIMIT = """
import os, resource, sys
import torch, disco_client
held = []
def leave(free):
    while held:
        os.close(held.pop())
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        for _ in range(free):
            os.close(held.pop())
"""

FEW = f"""{LIMIT}
said = []
for free in range(40):
    leave(free)
    try:
        disco_client.connect(sys.argv[1], arena="2MiB")
    except disco_client.NoDescriptors as error:
        said.append(str(error))
    else:
        said.append("attached")
        disco_client.close()
leave(20)
print(said)
"""

BACK = f"""{LIMIT}
from types import SimpleNamespace
from pathlib import Path
from tests.integration.test_recovery import sever_io
disco_client.connect(sys.argv[1], arena="2MiB", min_bytes="4KiB", reconnect_timeout=0.3)
manager = disco_client.DiskOffloadManager()
handles = [manager.save_tensor(torch.full((1 << 17,), float(i))) for i in range(12)]
for handle in handles:
    manager.wait_for_save(handle, 10)
assert sever_io(SimpleNamespace(socket_dir=Path(sys.argv[1]))) == 1
leave(3)
try:
    for handle in handles:
        manager.load_tensor(handle)
except disco_client.NoDescriptors as error:
    print(error)
leave(40)
for number, handle in enumerate(handles):
    assert bool((manager.load_tensor(handle) == number).all())
print("loaded")
"""


class TestLimits:
    @pytest.mark.timeout(4000 if os.environ.get("DISCOD_TEST_LONG") == "1" else 120)
    def test_many_small_tensors_with_few_fds(self, start_daemon: Callable[..., Daemon]) -> None:
        """One fd, file or mapping for each would end at the first thousand.

        Nothing needs locked memory either, and what limits there are of it do not matter.
        DISCOD_TEST_LONG=1: 200 000 saves, of which 20 000 are alive at a time.
        """
        long = os.environ.get("DISCOD_TEST_LONG") == "1"
        limits = ["prlimit", "--nofile=256:256", "--memlock=65536:65536"]
        daemon = start_daemon(prefix=limits)
        fds = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        saves, live = (200_000, 20_000) if long else (1_500, 700)
        settings = [str(daemon.socket_dir), str(saves), str(live), "32MiB" if long else "2MiB"]
        command = ["-c", SMALL, *settings]
        process = nursery.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=3600)
        finally:
            process.close()
        assert process.returncode == 0, err
        assert int(out.split()[0]) == saves
        assert err == ""
        eventually(lambda: not daemon.status()["clients"])
        eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= fds + 1)

    def test_too_few_fds_to_attach(self, daemon: Daemon) -> None:
        """libzmq would end the trainer (SIGABRT) where it can make none for its threads."""
        process = nursery.start("-c", FEW, daemon.socket_dir, stdout=subprocess.PIPE)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.close()
        assert process.returncode == 0, out
        said = ast.literal_eval(out)
        assert said[0] != "attached", "with none at all"
        assert said[-1] == "attached"
        assert said == sorted(said, key=lambda text: text == "attached")
        limits = [text for text in said if text != "attached"]
        for text in limits:
            found = re.search(
                r"takes (\d+) .* open only (\d+) more \((\d+) are open.* (\d+), and", text
            )
            assert found, text
            needed, free, used, limit = map(int, found.groups())
            assert free < needed
            assert free + used == limit == 200
            for part in ("setrlimit", "ulimit -n", "not tried"):
                assert part in text
        eventually(lambda: not daemon.status()["clients"])

    def test_too_few_fds_to_come_back(self, daemon: Daemon) -> None:
        """The same when the connection broke, and some were opened since; nothing is lost."""
        process = nursery.start("-c", BACK, daemon.socket_dir, stdout=subprocess.PIPE)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.close()
        assert process.returncode == 0, out
        assert "this process may open only" in out.splitlines()[0]
        assert out.splitlines()[1] == "loaded"

    def test_no_room_for_the_arenas_memory(self, daemon: Daemon) -> None:
        """A limit on files' sizes, which memfds are too, would be a signal instead of an error."""
        program = (
            "import resource, sys, disco_client\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({8 << 20}, {8 << 20}))\n"
            "try:\n    disco_client.connect(sys.argv[1], arena='64MiB')\n"
            "except disco_client.ArenaFull as error:\n    print(error)\n"
        )
        process = nursery.start("-c", program, daemon.socket_dir, stdout=subprocess.PIPE)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.close()
        assert process.returncode == 0
        assert "64.0 MiB" in out
        assert "RLIMIT_FSIZE" in out
        assert not daemon.status()["clients"]


STEPS = """
import sys, torch, disco_client
disco_client.connect(sys.argv[1], arena="4MiB", min_bytes="4KiB")
layers = [torch.nn.Linear(256, 256) for _ in range(6)]
phase = "forward"
def layer(one, x):
    if phase == sys.argv[2]:
        print("ready", flush=True)
    return one(x)
while True:
    x = torch.randn(1024, 256, requires_grad=True)
    phase = "forward"
    for one in layers:
        x = disco_client.checkpoint(lambda h, one=one: layer(one, h), x)
    phase = "backward"
    x.sum().backward()
"""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c(shared_daemon: Daemon, where: str) -> None:
    """It would hang, or leave something behind that keeps the next run from starting."""
    for _ in range(1 if where == "forward" else 2):  # and again at once
        trainer = nursery.start(
            *("-c", STEPS, shared_daemon.socket_dir, where),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert trainer.stdout.readline() == "ready\n"
            began = time.monotonic()
            trainer.send_signal(signal.SIGINT)
            _, err = trainer.communicate(timeout=20)  # 0.5 s alone; a busy machine takes some more
        finally:
            trainer.close()
        print(f"the exit took {time.monotonic() - began:.2f} s")
        # Where it came in the middle of a change, a call in between may have said so first.
        assert trainer.returncode in (-signal.SIGINT, 1), err
        assert "KeyboardInterrupt" in err or "interrupted (Ctrl-C?)" in err
        eventually(lambda: not shared_daemon.status()["clients"], 5)
        eventually(lambda: not shared_daemon.status()["disk_used_bytes"], 5)
        assert not shared_daemon.status()["ram_used_bytes"]


def test_crash_and_start_again(daemon: Daemon, tmp_path: Path) -> None:
    """A trainer in a crash loop would fill memory and disk until nothing starts any more."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.helpers.raw_client import MIB, RawClient\n"
        "client = RawClient(Path(sys.argv[1]), 16 * MIB)\n"
        "client.write(0, 0, 16 * MIB)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    fds = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for _ in range(20):
        done = subprocess.run([sys.executable, "-c", program, daemon.socket_dir], cwd=ROOT)
        assert done.returncode == -signal.SIGKILL
        eventually(lambda: not daemon.status()["clients"], 1.0)
        eventually(lambda: not daemon.status()["disk_used_bytes"], 1.0)
        assert not daemon.status()["ram_used_bytes"]
    # What is closed in the background comes after the answer that says so.
    eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= fds + 1)
    assert os.listdir(daemon.scratch) == []


def test_exit_while_the_daemon_is_dead(daemon: Daemon) -> None:
    """ZeroMQ's clean-up waits for messages that nobody takes: the process would never end."""
    program = (
        "import os, signal, sys, torch, disco_client\n"
        "disco_client.connect(sys.argv[1], arena='4MiB', min_bytes='4KiB')\n"
        "manager = disco_client.DiskOffloadManager()\n"
        "held = [manager.save_tensor(torch.zeros(1 << 18)) for _ in range(3)]\n"
        "os.kill(int(sys.argv[2]), signal.SIGKILL)\n"
        "held += [manager.save_tensor(torch.zeros(1 << 16))]\n"
        "manager.cleanup()\n"
        "print('ready', flush=True)\n"
    )
    trainer = nursery.start(
        "-c", program, daemon.socket_dir, str(daemon.pid), stdout=subprocess.PIPE
    )
    try:
        assert trainer.stdout.readline() == "ready\n"
        began = time.monotonic()
        assert trainer.wait(20) == 0, "it hangs"  # 0.3 s alone; a busy machine takes some seconds
        print(f"the exit took {time.monotonic() - began:.2f} s")
    finally:
        trainer.close()
