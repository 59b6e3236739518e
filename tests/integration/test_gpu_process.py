"""Device rings: a real daemon, its processes for fake GPUs, and clients that speak the protocol."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from discod.bounds import Refusal
from discod.cuda_driver import CudaError, Driver, load
from discod.exits import Exit
from discod.gpu_process import GpuProcess
from discod.gpus import MOST_GPUS, Gpus
from discod.loop import Loop
from discod.wire import BACKING_STEP_BYTES, PAGE_BYTES
from discod.wire.messages import CloseRing, CopyIn, CopyOut, Done, Failed, OpenRing, Ping, Write
from tests.helpers import impatient
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.device_ring import DeviceRing
from tests.helpers.fake_cuda import FakeCuda, uuid_of
from tests.helpers.raw_client import MIB, RawClient

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]

ARENA = 16 * MIB
IMPATIENT = [sys.executable, str(impatient.__file__)]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Two fake GPUs, for this process and for daemons that it starts.

    The test fails when anybody misused them, or a GPU process is left over.
    """
    directory = tmp_path / "cuda"
    directory.mkdir()
    fake = FakeCuda(directory, devices=2)
    for name, value in fake.env().items():
        monkeypatch.setenv(name, value)
    yield fake
    fake.heal()
    assert fake.violations() == []


@pytest.fixture
def driver(fake: FakeCuda) -> Driver:
    """CUDA in this process."""
    return load()


@pytest.fixture
def daemon(fake: FakeCuda, start_daemon: Start) -> Daemon:
    """A daemon with GPUs."""
    return start_daemon()


def pids(daemon: Daemon) -> list[int]:
    """Those of the daemon's GPU processes."""
    return [gpu["pid"] for gpu in daemon.status()["gpus"]]


def running(pid: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def opened(client: RawClient, driver: Driver, size_bytes: int = ARENA, **kwargs: int) -> DeviceRing:
    """A ring that the daemon has open."""
    ring = DeviceRing(driver, size_bytes, **kwargs)
    reply = ring.open(client)
    assert isinstance(reply, Done), reply
    return ring


def assert_copies(client: RawClient, ring: DeviceRing, seed: int = 0, count: int = 8) -> None:
    """Bytes go out and come back in as they were."""
    rng = random.Random(seed)
    page = rng.randrange(count) * PAGE_BYTES
    data = rng.randbytes(rng.randrange(1, 100_000))
    ring.write(page, data)
    ring.record(0)
    assert isinstance(client.answer(ring.copy_out(client, page, page, len(data))), Done)
    assert client.arena[page : page + len(data)] == data
    client.arena[page : page + len(data)] = other = rng.randbytes(len(data))
    assert isinstance(client.answer(ring.copy_in(client, page, page, len(data))), Done)
    assert ring.read(page, len(data)) == other


class TestCopies:
    def test_of_any_size(self, daemon: Daemon, raw_client: Connect, driver: Driver) -> None:
        """Bytes would be lost, spilled over or mixed up on the way."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        rng = random.Random(7)
        slots = rng.sample(range(ARENA // MIB), 12)
        blobs = [
            (slot * MIB, i * MIB, rng.randbytes(rng.choice([1, 4096, MIB, rng.randrange(1, MIB)])))
            for i, slot in enumerate(slots)
        ]
        sent = []
        for i, (slot, offset, data) in enumerate(blobs):
            ring.write(offset, data)
            ring.record(i % 4)
            sent.append(ring.copy_out(client, offset, slot, len(data), event=i % 4))
        for seq in sent:
            assert isinstance(client.answer(seq), Done)
        for slot, _, data in blobs:
            assert client.arena[slot : slot + MIB] == data + bytes(MIB - len(data))
        ring.write(0, bytes(ARENA))
        sent = [ring.copy_in(client, offset, slot, len(data)) for slot, offset, data in blobs]
        for seq in sent:
            assert isinstance(client.answer(seq), Done)
        for _, offset, data in blobs:
            assert ring.read(offset, MIB) == data + bytes(MIB - len(data))
        (status,) = daemon.status()["gpus"]
        assert status["copied_bytes"] == 2 * sum(len(data) for _, _, data in blobs)
        assert status["clients"] == 1

    def test_across_pinned_pieces(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """CUDA refuses a copy over the border of two registrations; all of RAM would be pinned."""
        size = 3 * BACKING_STEP_BYTES - MIB
        client = raw_client(daemon, size)
        ring = opened(client, driver)
        data = random.Random(1).randbytes(2 * MIB)
        ring.write(0, data)
        border = 2 * BACKING_STEP_BYTES - MIB
        assert isinstance(client.answer(ring.copy_out(client, 0, border, 2 * MIB)), Done)
        assert client.arena[border : border + 2 * MIB] == data
        (pid,) = pids(daemon)
        assert fake.registered_bytes()[pid] == 2 * BACKING_STEP_BYTES - MIB

    def test_waits_for_its_event(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A tensor would be saved before it is computed."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        fake.hang("record", pid=os.getpid())
        ring.record(1)
        copy = ring.copy_out(client, 0, 0, MIB, event=1)
        assert isinstance(client.answer(ring.copy_in(client, MIB, MIB, MIB)), Done)
        assert client.arena[:MIB] == bytes(MIB)
        data = random.Random(2).randbytes(MIB)
        ring.write(0, data)
        fake.heal()
        assert isinstance(client.answer(copy), Done)
        assert client.arena[:MIB] == data

    def test_one_client_does_not_wait_for_another(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A rank in a long kernel would hold up all ranks of its GPU."""
        late, early = raw_client(daemon), raw_client(daemon)
        late_ring, early_ring = opened(late, driver), opened(early, driver)
        fake.hang("record", pid=os.getpid())
        late_ring.record(0)
        waiting = [late_ring.copy_out(late, 0, 0, 100) for _ in range(100)]
        for seed in range(10):
            data = random.Random(seed).randbytes(MIB)
            early_ring.write(0, data)
            assert isinstance(early.answer(early_ring.copy_out(early, 0, 0, MIB, event=1)), Done)
            assert early.arena[:MIB] == data
        assert daemon.status()["clients"][0]["in_flight"] == 100
        fake.heal()
        for seq in waiting:
            assert isinstance(late.answer(seq), Done)

    def test_one_client_does_not_crowd_out_another(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A rank that saves much would hold up the loads of the other ranks of its GPU."""
        greedy, modest = raw_client(daemon), raw_client(daemon)
        greedy_ring, modest_ring = opened(greedy, driver), opened(modest, driver)
        fake.delay("copy", 0.05, pid=pids(daemon)[0])
        sent = [greedy_ring.copy_out(greedy, 0, 0, 100) for _ in range(100)]
        assert isinstance(modest.answer(modest_ring.copy_in(modest, 0, 0, MIB)), Done)
        assert daemon.status()["clients"][0]["in_flight"] > 20
        fake.heal()
        for seq in sent:
            assert isinstance(greedy.answer(seq), Done)

    def test_many_at_once(self, daemon: Daemon, raw_client: Connect, driver: Driver) -> None:
        """More than fits on the way to the GPU process would be lost, or answered twice."""
        clients = [raw_client(daemon) for _ in range(3)]
        rings = [opened(client, driver) for client in clients]
        sent = []
        for i in range(1000):
            for client, ring in zip(clients, rings, strict=True):
                ring.write(i * PAGE_BYTES, b"%d" % i)
                sent.append((client, ring.copy_out(client, i * PAGE_BYTES, i * PAGE_BYTES, 8)))
        for client, seq in sent:
            assert isinstance(client.answer(seq), Done)
        for client in clients:
            assert all(client.arena[i * PAGE_BYTES :][:4].startswith(b"%d" % i) for i in [0, 999])
            assert client.dealer.poll(0) == 0

    def test_a_full_connection(self, daemon: Daemon, raw_client: Connect, driver: Driver) -> None:
        """A GPU process that is slow would stop the daemon, or lose what does not fit."""
        clients = [raw_client(daemon, 2 * MIB) for _ in range(16)]
        rings = [opened(client, driver, 2 * MIB) for client in clients]
        (pid,) = pids(daemon)
        os.kill(pid, signal.SIGSTOP)
        try:
            sent = [
                (client, ring.copy_out(client, 0, i * PAGE_BYTES, 8))
                for i in range(100)
                for client, ring in zip(clients, rings, strict=True)
            ]
            eventually(lambda: {c["in_flight"] for c in daemon.status()["clients"]} == {100})
            assert isinstance(clients[0].write(0, 0, MIB), Done)
        finally:
            os.kill(pid, signal.SIGCONT)
        for client, seq in sent:
            assert isinstance(client.answer(seq), Done)
        assert pids(daemon) == [pid]

    def test_two_gpus(self, daemon: Daemon, raw_client: Connect, driver: Driver) -> None:
        """A copy would go through another GPU, or not at all on a node with several."""
        client = raw_client(daemon)
        rings = [opened(client, driver, ordinal=i, number=i + 5) for i in range(2)]
        for seed, ring in enumerate(rings):
            assert_copies(client, ring, seed)
        status = daemon.status()["gpus"]
        assert [entry["uuid"] for entry in status] == [
            "GPU-66616b65-2d63-7564-612d-6770752d3030",
            "GPU-66616b65-2d63-7564-612d-6770752d3031",
        ]
        assert len(set(pids(daemon))) == 2

    def test_status_for_people(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, socket_dir: Path
    ) -> None:
        """Nobody could see that a GPU is served."""
        client = raw_client(daemon)
        assert_copies(client, opened(client, driver))
        command = [sys.executable, "-m", "discod", "status", "--socket-dir", str(socket_dir)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "GPU-66616b65-2d63-7564-612d-6770752d3030" in shown
        assert str(pids(daemon)[0]) in shown


class TestDetach:
    def test_is_acknowledged_once_nothing_is_mapped(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A client would free memory that the daemon is copying from: a crash on a real GPU."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        (pid,) = pids(daemon)
        fake.delay("copy", 0.2, pid=pid)
        ring.write(0, b"x" * MIB)
        copies = [ring.copy_out(client, 0, i * MIB, MIB) for i in range(3)]
        close = client.send(CloseRing, ring=0)
        assert isinstance(client.answer(close), Done)
        assert not fake.open_handles()
        ring.free()
        assert fake.violations() == []
        for seq in copies:
            assert isinstance(client.answer(seq), Done)
        assert client.arena[: 3 * MIB] == b"x" * 3 * MIB
        eventually(lambda: not fake.registered_bytes())

    def test_too_early_is_seen(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """The test above would pass without any acknowledgement."""
        ring = opened(raw_client(daemon), driver)
        ring.free()
        (violation,) = fake.violations()
        assert f"which pid {pids(daemon)[0]} has open" in violation
        (fake.directory / "violations").unlink()

    def test_twice_and_of_nothing(
        self, daemon: Daemon, raw_client: Connect, driver: Driver
    ) -> None:
        """A detach that is sent again would never be answered."""
        client = raw_client(daemon)
        assert isinstance(client.ask(CloseRing, ring=0), Done)
        opened(client, driver)
        sent = [client.send(CloseRing, ring=0) for _ in range(3)]
        for seq in sent:
            assert isinstance(client.answer(seq), Done)

    def test_open_again(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A ring could not be replaced, or one that is opened twice never be closed."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        assert isinstance(ring.open(client), Done)
        larger = DeviceRing(driver, 2 * ARENA)
        assert larger.open(client).kind == "refused"
        assert isinstance(client.ask(CloseRing, ring=0), Done)
        assert not fake.open_handles()
        assert isinstance(larger.open(client), Done)
        assert_copies(client, larger)

    def test_while_the_process_is_dead(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A trainer would wait at its end for a process that cannot be started."""
        client = raw_client(daemon)
        opened(client, driver)
        (pid,) = pids(daemon)
        fake.fail("cuInit", 999, times=100)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(client.ask(CloseRing, ring=0), Done)
        assert not fake.open_handles()


class TestUnavailable:
    def test_no_library(self, start_daemon: Start, raw_client: Connect) -> None:
        """A daemon without CUDA would not start, or leave the client waiting."""
        daemon = start_daemon(env={"DISCOD_CUDA_LIBRARY": "/nowhere/libcuda.so.1"})
        client = raw_client(daemon)
        fields = {"uuid": uuid_of(0), "handle": bytes(64), "ring_bytes": MIB, "events": ()}
        reply = client.ask(OpenRing, ring=0, **fields)
        assert reply.kind == "gpu"
        assert "/nowhere/libcuda.so.1 cannot be loaded" in reply.text
        assert "install the NVIDIA driver" in reply.text
        assert isinstance(client.write(0, 0, MIB), Done)
        eventually(lambda: not daemon.status()["gpus"])

    def test_modules_of_the_working_directory(
        self, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A ``uuid.py`` where the daemon happens to be started would end every GPU process."""
        (tmp_path / "uuid.py").write_text("raise RuntimeError('not the uuid of the library')")
        monkeypatch.chdir(tmp_path)
        loop = Loop()
        said: list[str] = []

        def ready(refusal: str) -> None:
            said.append(refusal)
            process.kill()

        def ended(how: str) -> None:
            said.append(how)
            loop.stop()

        process = GpuProcess(loop, uuid_of(0), "a GPU", ready, lambda answer: None, ended)
        loop.run(lambda: False)
        loop.close()
        assert said == ["", "Killed"]

    def test_another_gpu(self, daemon: Daemon, raw_client: Connect, driver: Driver) -> None:
        """The daemon would take a GPU for one that it does not see."""
        client = raw_client(daemon)
        reply = DeviceRing(driver, MIB).open(client, uuid=bytes(range(16)))
        assert reply.kind == "gpu"
        assert "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f is none of them" in reply.text
        assert "CUDA_VISIBLE_DEVICES" in reply.text

    def test_a_gpu_that_is_taken(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """On a GPU without memory for a context the process would be started again and again."""
        client = raw_client(daemon)
        ring = DeviceRing(driver, MIB)
        fake.fail("cuDevicePrimaryCtxRetain", 46)
        reply = ring.open(client)
        assert (reply.kind, "CUDA_ERROR_DEVICE_UNAVAILABLE" in reply.text) == ("gpu", True)
        assert "has ended" not in daemon.log
        assert isinstance(ring.open(client), Done)

    def test_a_bad_handle(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A handle that cannot be opened would take the GPU process down, for all clients."""
        other, client = raw_client(daemon), raw_client(daemon)
        kept = opened(other, driver)
        before = pids(daemon)
        ring = DeviceRing(driver, MIB)
        for changes in [{"handle": bytes(64)}, {"events": (bytes(64),)}, {"ring_bytes": 2 * MIB}]:
            reply = ring.open(client, **changes)
            assert (reply.kind, "OpenRing" in reply.text) == ("gpu", True)
            assert fake.open_handles() == {before[0]: 1}
        assert ring.copy_out(client, 0, 0, 1)
        assert isinstance(ring.open(client), Done)
        assert_copies(client, ring)
        assert_copies(other, kept)
        assert pids(daemon) == before

    def test_memory_that_cannot_be_pinned(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A low limit on locked memory would make the GPU useless, or flood the log."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        fake.fail("cuMemHostRegister_v2", 2, times=1000)
        for seed in range(5):
            assert_copies(client, ring, seed)
        assert daemon.log.count("cannot be pinned") == 1
        assert "LimitMEMLOCK" in daemon.log

    def test_no_process(self, start_daemon: Start, raw_client: Connect, driver: Driver) -> None:
        """A daemon that cannot start a process, on a full node, would leave clients waiting."""
        daemon = start_daemon(prefix=[sys.executable, "-c", CHILDLESS])
        client = raw_client(daemon)
        ring = DeviceRing(driver, MIB)
        for _ in range(2):
            reply = ring.open(client)
            assert (reply.kind, "cannot start a process" in reply.text) == ("gpu", True)
        assert isinstance(client.ask(CloseRing, ring=0), Done)
        assert daemon.status()["gpus"] == []

    def test_no_stream(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A GPU that is full would take its process from the clients that have it."""
        other, client = raw_client(daemon), raw_client(daemon)
        kept = opened(other, driver)
        before = pids(daemon)
        ring = DeviceRing(driver, MIB)
        fake.fail("cuStreamCreate", 2, after=1, pid=before[0])
        reply = ring.open(client)
        assert (reply.kind, "could not be added" in reply.text) == ("gpu", True)
        assert isinstance(ring.open(client), Done)
        assert_copies(client, ring)
        assert_copies(other, kept)
        assert pids(daemon) == before

    def test_an_event_of_which_cuda_knows_nothing(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """One client's broken event would take the GPU's process from the others."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        before = pids(daemon)
        fake.fail("cuEventQuery", 400)
        fake.fail("cuStreamWaitEvent", 400)
        assert client.answer(ring.copy_out(client, 0, 0, MIB)).kind == "gpu"
        assert_copies(client, ring)
        assert pids(daemon) == before

    def test_a_copy_that_cuda_refuses(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """The bytes would count as saved, or the client never learn to copy itself."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        fake.fail("cuMemcpyAsync", 1)
        reply = client.answer(ring.copy_out(client, 0, 0, MIB))
        assert reply.kind == "gpu"
        assert "CUDA_ERROR_INVALID_VALUE" in reply.text
        assert_copies(client, ring)


CHILDLESS = """
import sys
from discod.cli import main
sys.executable = "/nowhere/python"
main(sys.argv[4:])
"""

P = PAGE_BYTES
BOUNDS = [
    {"length": 0},
    {"length": -1},
    {"slot": 1},
    {"offset": 512},
    {"slot": -1},
    {"offset": -1},
    {"ring": 1},
    {"ring": -1},
    {"slot": ARENA},
    {"slot": ARENA - P, "length": P + 1},
    {"offset": MIB},
    {"offset": MIB - P, "length": P + 1},
    {"length": (1 << 63) - 1},
    {"slot": (1 << 63) - P},
    {"offset": (1 << 63) - P},
]
OPENINGS: list[dict[str, Any]] = [
    {"ring": 64},
    {"ring": -1},
    {"uuid": bytes(15)},
    {"handle": bytes(63)},
    {"events": (bytes(64), bytes(1))},
    {"ring_bytes": 0},
    {"ring_bytes": -1},
    {"ring_bytes": MIB + 1},
    {"ring_bytes": 1 << 62},
]


class TestBounds:
    def test_of_copies(self, daemon: Daemon, raw_client: Connect, driver: Driver) -> None:
        """A client could have the GPU process touch memory that is not its own."""
        client = raw_client(daemon)
        opened(client, driver, MIB)
        good = {"ring": 0, "offset": 0, "slot": 0, "length": P}
        for verb in (CopyOut, CopyIn):
            for wrong in BOUNDS:
                fields = good | wrong | ({"event": 0} if verb is CopyOut else {})
                reply = client.ask(verb, **fields)
                assert isinstance(reply, Failed), wrong
                assert (reply.kind, verb.__name__ in reply.text) == ("refused", True), wrong
        for event in (-1, 4):
            assert client.ask(CopyOut, **good, event=event).kind == "refused"
        assert isinstance(client.ask(CopyIn, **good | {"slot": ARENA - P}), Done)

    def test_of_rings(self, daemon: Daemon, raw_client: Connect, driver: Driver) -> None:
        """A client could make the daemon start processes with nonsense."""
        client = raw_client(daemon)
        ring = DeviceRing(driver, MIB)
        for wrong in OPENINGS:
            reply = ring.open(client, **wrong)
            assert isinstance(reply, Failed), wrong
            assert reply.kind == "refused", wrong
        assert pids(daemon) == []

    def test_of_gpus(self) -> None:
        """A client that names ever more GPUs would have the daemon start ever more processes."""
        loop = Loop()
        gpus = Gpus(loop)
        seats = [gpus.seat(bytes([number] * 16), -1, MIB) for number in range(MOST_GPUS)]
        with pytest.raises(Refusal, match=f"{MOST_GPUS} GPUs"):
            gpus.seat(bytes([MOST_GPUS] * 16), -1, MIB)
        assert gpus.seat(bytes(16), -1, MIB), "of a GPU that has a process"
        seats[5].leave(lambda: None)
        assert gpus.seat(bytes([MOST_GPUS] * 16), -1, MIB)
        loop.close()

    def test_seq_in_use(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """Two requests with one number would mix up their answers."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        fake.hang("copy", pid=pids(daemon)[0])
        seq = ring.copy_out(client, 0, 0, P)
        for verb, fields in [
            (CopyIn, {"ring": 0, "offset": 0, "slot": 0, "length": P}),
            (Write, {"file": 0, "offset": 0, "slot": 0, "length": P}),
        ]:
            client.send(verb, seq=seq, **fields)
            refused = client.answer(seq)
            assert (refused.kind, "seq" in refused.text) == ("refused", True)
        fake.heal()
        assert isinstance(client.answer(seq), Done)


class TestRestart:
    def test_killed_in_the_midst_of_copies(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A GPU process that dies would take the step with it."""
        clients = [raw_client(daemon) for _ in range(2)]
        rings = [opened(client, driver) for client in clients]
        (pid,) = pids(daemon)
        fake.hang("copy", pid=pid)
        data = [random.Random(i).randbytes(ARENA) for i in range(2)]
        sent = []
        for client, ring, whole in zip(clients, rings, data, strict=True):
            ring.write(0, whole)
            ring.record(0)
            sent += [
                (client, ring.copy_out(client, i * MIB, i * MIB, MIB)) for i in range(ARENA // MIB)
            ]
        eventually(lambda: fake.registered_bytes()[pid] == 2 * ARENA)
        eventually(lambda: [c["in_flight"] for c in daemon.status()["clients"]] == [16, 16])
        os.kill(pid, signal.SIGKILL)
        for client, seq in sent:
            assert isinstance(client.answer(seq), Done)
        for client, whole in zip(clients, data, strict=True):
            assert client.arena[:] == whole
        assert pids(daemon) != [pid]
        assert "32 requests go to a new one" in daemon.log

    def test_killed_when_idle(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """The rings that were open would be unknown to the next process."""
        client = raw_client(daemon)
        rings = [opened(client, driver, number=i) for i in range(3)]
        (pid,) = pids(daemon)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: pids(daemon) not in ([pid], [0]))
        for seed, ring in enumerate(rings):
            assert_copies(client, ring, seed)
        assert sum(fake.open_handles().values()) == 3

    def test_a_ring_that_cannot_be_opened_again(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A copy would wait for a ring that never comes, or end the whole GPU's use."""
        client = raw_client(daemon)
        lost, kept = (opened(client, driver, number=i) for i in range(2))
        (pid,) = pids(daemon)
        fake.fail("cuIpcOpenMemHandle_v2", 400)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: pids(daemon) not in ([pid], [0]))
        assert client.answer(lost.copy_out(client, 0, 0, MIB)).kind == "gpu"
        assert_copies(client, kept)
        assert "a ring cannot be opened again" in daemon.log

    @pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventQuery", "cuMemHostRegister_v2"])
    def test_stuck(
        self, start_daemon: Start, raw_client: Connect, driver: Driver, fake: FakeCuda, call: str
    ) -> None:
        """A call into the driver that never returns would hang the training for ever."""
        daemon = start_daemon(prefix=IMPATIENT)
        client = raw_client(daemon)
        ring = opened(client, driver)
        (pid,) = pids(daemon)
        fake.hang(call, pid=pid)
        assert_copies(client, ring)
        assert f"(pid {pid}) is killed: it has not answered" in daemon.log
        assert not running(pid)

    def test_stuck_at_its_start(
        self, start_daemon: Start, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A driver that does not start would hang the daemon, or the client's other requests."""
        daemon = start_daemon(prefix=IMPATIENT)
        client = raw_client(daemon)
        ring = DeviceRing(driver, MIB)
        fake.hang("cuInit")
        opening = client.send(OpenRing, **ring.opening())
        assert isinstance(client.ask(Ping), Done)
        assert isinstance(client.write(0, 0, MIB), Done)
        fake.heal()
        assert isinstance(client.answer(opening), Done)

    def test_dies_of_every_copy(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A GPU that is lost would be tried again for ever, and the client never copy by itself."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        fake.fail("cuEventRecord", 700, times=1000)
        sent = [ring.copy_out(client, 0, 0, MIB) for _ in range(5)]
        for seq in sent:
            reply = client.answer(seq)
            assert reply.kind == "gpu"
            assert "died 3 times in a row" in reply.text
        assert client.answer(ring.copy_out(client, 0, 0, MIB)).kind == "gpu"
        assert daemon.log.count("in a row without a copy") == 1
        assert pids(daemon) == [0]
        fake.heal()
        assert isinstance(ring.open(client), Done)
        assert_copies(client, ring)

    def test_copies_in_between_count(
        self, daemon: Daemon, raw_client: Connect, driver: Driver
    ) -> None:
        """Three deaths in a month would end a job's use of its GPU."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        for seed in range(4):
            (pid,) = pids(daemon)
            os.kill(pid, signal.SIGKILL)
            assert_copies(client, ring, seed)
            eventually(lambda pid=pid: pids(daemon) != [pid])  # type: ignore[misc]  # the default

    def test_ends_when_nobody_needs_it(
        self, start_daemon: Start, raw_client: Connect, driver: Driver
    ) -> None:
        """Its context would hold half a GB of GPU memory while other jobs run."""
        daemon = start_daemon(prefix=IMPATIENT)
        client = raw_client(daemon)
        assert_copies(client, opened(client, driver))
        client.close()
        eventually(lambda: not daemon.status()["gpus"])
        again = raw_client(daemon)
        assert_copies(again, opened(again, driver))
        assert "has ended" not in daemon.log

    def test_signals_of_a_group_leave_it_alone(
        self, daemon: Daemon, raw_client: Connect, driver: Driver
    ) -> None:
        """Ctrl-C, or a service manager, would end it before the copies that the daemon awaits."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        (pid,) = pids(daemon)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
            assert_copies(client, ring)
        assert pids(daemon) == [pid]


TRAINER = """
import sys, time
from pathlib import Path
from discod.cuda_driver import load
from tests.helpers.device_ring import DeviceRing
from tests.helpers.raw_client import MIB, RawClient
client = RawClient(Path(sys.argv[1]), 64 * MIB)
ring = DeviceRing(load(), 16 * MIB)
ring.open(client)
for i in range(100):
    ring.copy_out(client, 0, i % 64 * MIB, MIB)
    ring.copy_in(client, 0, i % 64 * MIB, MIB)
print("busy", flush=True)
time.sleep(60)
"""


@pytest.fixture
def trainer(daemon: Daemon, fake: FakeCuda) -> Iterator[subprocess.Popen[str]]:
    """Another client's process, with copies in flight."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(daemon.socket_dir)], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "busy\n"
    yield trainer
    trainer.kill()
    trainer.stdout.close()
    trainer.wait()


class TestClients:
    def test_killed_in_the_midst_of_copies(
        self,
        daemon: Daemon,
        raw_client: Connect,
        driver: Driver,
        fake: FakeCuda,
        trainer: subprocess.Popen[str],
    ) -> None:
        """A dead rank would hold RAM and GPU memory, or take the GPU process from the others."""
        other = raw_client(daemon)
        ring = opened(other, driver)
        (pid,) = pids(daemon)
        fake.delay("copy", 0.02, pid=pid)
        eventually(lambda: sum(c["in_flight"] for c in daemon.status()["clients"]) > 20)
        assert daemon.status()["ram_used_bytes"] == 80 * MIB
        trainer.kill()
        began = time.monotonic()
        eventually(lambda: daemon.status()["ram_used_bytes"] == 16 * MIB)
        assert time.monotonic() - began < 1.5
        assert fake.open_handles() == {pid: 1}
        assert "memfd:discod-test" in Path(f"/proc/{pid}/maps").read_text()
        assert_copies(other, ring)
        assert fake.registered_bytes() == {pid: ARENA}
        assert pids(daemon) == [pid]

    def test_killed_with_an_event_that_is_never_done(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """The GPU process would wait for a kernel of a process that is gone."""
        trainer = subprocess.Popen(
            [sys.executable, "-c", LATE_TRAINER, str(daemon.socket_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        try:
            fake.hang("record", pid=trainer.pid)
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            assert trainer.stdout.readline() == "waits\n"
            (pid,) = pids(daemon)
            eventually(lambda: daemon.status()["clients"][0]["in_flight"] == 3)
            trainer.kill()
            eventually(lambda: daemon.status()["ram_used_bytes"] == 0)
            assert pids(daemon) == [pid]
            assert not fake.open_handles()
        finally:
            trainer.kill()
            trainer.stdin.close()
            trainer.stdout.close()
            trainer.wait()

    def test_killed_while_the_process_is_stuck(
        self,
        daemon: Daemon,
        raw_client: Connect,
        driver: Driver,
        fake: FakeCuda,
        trainer: subprocess.Popen[str],
    ) -> None:
        """A dead rank's RAM would never be free."""
        other = raw_client(daemon)
        ring = opened(other, driver)
        (pid,) = pids(daemon)
        fake.hang("copy", pid=pid)
        copy = ring.copy_out(other, 0, 0, MIB)
        trainer.kill()
        eventually(lambda: daemon.status()["ram_used_bytes"] == 16 * MIB)
        assert isinstance(other.answer(copy), Done)
        assert f"(pid {pid}) is killed: it keeps a client's memory" in daemon.log
        assert_copies(other, ring)

    def test_hung_up_on(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A client that comes back could not use its ring, or be told too early to free it."""
        client = raw_client(daemon)
        assert isinstance(client.write(0, 0, MIB), Done)
        ring = opened(client, driver)
        fake.delay("copy", 0.1, pid=pids(daemon)[0])
        for i in range(8):
            ring.copy_out(client, 0, i * MIB, MIB)
        client.dealer.send(b"garbage")
        assert client.lifeline.recv(1) == b""
        client.detach()
        client.attach(daemon.socket_dir)
        assert not fake.open_handles()
        fake.heal()
        assert isinstance(client.ask(CloseRing, ring=0), Done)
        assert isinstance(ring.open(client), Done)
        assert_copies(client, ring)


LATE_TRAINER = """
import sys, time
from pathlib import Path
from discod.cuda_driver import load
from tests.helpers.device_ring import DeviceRing
from tests.helpers.raw_client import MIB, RawClient
sys.stdin.readline()
client = RawClient(Path(sys.argv[1]), 64 * MIB)
ring = DeviceRing(load(), 16 * MIB)
ring.open(client)
ring.record(0)
for i in range(3):
    ring.copy_out(client, 0, i * MIB, MIB)
print("waits", flush=True)
time.sleep(60)
"""


class TestDaemon:
    def test_killed(
        self,
        daemon: Daemon,
        start_daemon: Start,
        raw_client: Connect,
        driver: Driver,
        fake: FakeCuda,
    ) -> None:
        """A daemon that dies would leave GPU memory mapped, or the client without its copies."""
        client = raw_client(daemon)
        assert isinstance(client.write(0, 0, MIB), Done)
        ring = opened(client, driver)
        (pid,) = pids(daemon)
        data = random.Random(3).randbytes(ARENA)
        ring.write(0, data)
        fake.hang("copy", pid=pid)
        for i in range(16):
            ring.copy_out(client, i * MIB, i * MIB, MIB)
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] == 16)
        daemon.kill()
        eventually(lambda: not running(pid))
        assert not fake.open_handles()
        second = start_daemon()
        client.detach()
        client.attach(second.socket_dir)
        assert isinstance(ring.open(client), Done)
        sent = [ring.copy_out(client, i * MIB, i * MIB, MIB) for i in range(16)]
        for seq in sent:
            assert isinstance(client.answer(seq), Done)
        assert client.arena[:] == data

    def test_drains(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """Copies in flight at SIGTERM would be done for nothing, or the process be left over."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        (pid,) = pids(daemon)
        fake.delay("copy", 0.05, pid=pid)
        sent = [ring.copy_out(client, 0, i * MIB, MIB) for i in range(16)]
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] > 8)
        daemon.terminate()
        for seq in sent:
            assert isinstance(client.answer(seq), Done)
        assert daemon.wait() == Exit.OK
        eventually(lambda: not running(pid))
        assert "left to the next daemon" not in daemon.log

    def test_ends_though_the_process_is_stuck(
        self, daemon: Daemon, raw_client: Connect, driver: Driver, fake: FakeCuda
    ) -> None:
        """A service manager would have to kill the daemon."""
        client = raw_client(daemon)
        ring = opened(client, driver)
        (pid,) = pids(daemon)
        fake.hang("cuMemcpyAsync", pid=pid)
        ring.copy_out(client, 0, 0, MIB)
        eventually(lambda: daemon.status()["clients"][0]["in_flight"] == 1)
        began = time.monotonic()
        daemon.terminate()
        assert daemon.wait() == Exit.OK
        assert time.monotonic() - began < 6
        eventually(lambda: not running(pid))

    def test_knows_no_cuda(self) -> None:
        """The daemon would load a driver that can crash it, and start later."""
        code = "import sys, discod.server; sys.exit('discod.cuda_driver' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_ring_of_this_process_only(driver: Driver) -> None:
    """The tests above would pass with a fake that opens anything."""
    ring = DeviceRing(driver, MIB)
    with driver.on(0), pytest.raises(CudaError):
        driver.ipc_open_mem(ring.handle)
