"""The binding of the CUDA driver, and the fake driver that tests without a GPU rely on."""

import ctypes
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from discod.cuda_driver import CudaError, CudaUnavailable, Driver, load
from tests.helpers.daemon import eventually
from tests.helpers.fake_cuda import FakeCuda, uuid_of

MIB = 1 << 20


@pytest.fixture
def fake(tmp_path: Path) -> FakeCuda:
    """A fake with two GPUs."""
    return FakeCuda(tmp_path, devices=2, memory_bytes=256 * MIB)


@pytest.fixture
def driver(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver in this process, on the first GPU."""
    for name, value in fake.env().items():
        monkeypatch.setenv(name, value)
    driver = load()
    with driver.on(0):
        yield driver
        fake.heal()
        driver.context_synchronize()


class Buffer:
    """Host memory with an address."""

    def __init__(self, data: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(data, len(data))
        self.address = ctypes.addressof(self._bytes)

    def __bytes__(self) -> bytes:
        return self._bytes.raw


OTHER = """
import sys
from discod.cuda_driver import CudaError, load
driver = load()
with driver.on(0):
    for line in sys.stdin:
        try:
            print(repr(eval(line)), flush=True)
        except CudaError as error:
            print(repr(error.code), flush=True)
"""


class Other:
    """Another process that uses the same fake, one expression at a time."""

    def __init__(self, fake: FakeCuda) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | fake.env(),
        )

    def ask(self, expression: str) -> Any:
        """What the expression gives there; of a CudaError, its code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return eval(self.process.stdout.readline())

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def other(fake: FakeCuda) -> Iterator[Other]:
    """A second process."""
    other = Other(fake)
    yield other
    other.close()


@contextmanager
def fails(code: int) -> Iterator[None]:
    """What is inside raises a CudaError with this code."""
    with pytest.raises(CudaError) as caught:
        yield
    assert caught.value.code == code


class TestAvailability:
    def test_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Users without a GPU would see a loader's message that tells them nothing to do."""
        monkeypatch.setenv("DISCOD_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
        with pytest.raises(CudaUnavailable, match=r"/nowhere/libcuda.so.1.*install the NVIDIA"):
            load()

    def test_another_library(self) -> None:
        """A library without the calls would fail in the midst of training."""
        with pytest.raises(CudaUnavailable, match="cannot be loaded"):
            load("libc.so.6")

    def test_no_device(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A container without its GPUs would fail at the first save, not with a remedy."""
        for name, value in FakeCuda(tmp_path, devices=0).env().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CudaUnavailable, match=r"CUDA_ERROR_NO_DEVICE \(100\).*nvidia-smi"):
            load()

    def test_a_driver_that_does_not_start(
        self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A broken driver would be taken for one that works."""
        for name, value in fake.env().items():
            monkeypatch.setenv(name, value)
        fake.fail("cuInit", 999)
        with pytest.raises(CudaUnavailable, match="cuInit failed: CUDA_ERROR_UNKNOWN"):
            load()
        assert load().device_count() == 2

    def test_loaded_once(self, driver: Driver) -> None:
        """Each caller would start the driver, and retain contexts, again."""
        assert load() is driver


class TestBinding:
    def test_devices(self, driver: Driver) -> None:
        """A GPU would be taken for another one."""
        assert [driver.device_uuid(i) for i in range(driver.device_count())] == [
            uuid_of(0),
            uuid_of(1),
        ]
        with fails(101):
            driver.device_uuid(2)

    def test_an_error_says_what_failed(self, driver: Driver) -> None:
        """A report from a user would not tell which call failed, and how."""
        with pytest.raises(CudaError) as caught:
            driver.mem_free(4096)
        error = caught.value
        assert (error.call, error.code) == ("cuMemFree_v2", 1)
        assert error.name == "CUDA_ERROR_INVALID_VALUE"
        assert str(error) == ("cuMemFree_v2 failed: CUDA_ERROR_INVALID_VALUE (1), invalid argument")

    def test_an_error_without_a_name(self, fake: FakeCuda, driver: Driver) -> None:
        """A code of a newer driver would crash the error's own text."""
        fake.fail("cuMemGetInfo_v2", 12345)
        with pytest.raises(CudaError, match=r"unknown \(12345\)"):
            driver.mem_get_info()

    def test_contexts_nest_and_are_a_threads_own(self, driver: Driver) -> None:
        """Memory would come from another GPU than the caller is on."""
        whole = driver.mem_get_info()
        with driver.on(1):
            pointer = driver.mem_alloc(MIB)
            assert driver.mem_get_info()[0] == whole[0] - MIB
        assert driver.mem_get_info() == whole
        codes = []

        def elsewhere() -> None:
            try:
                driver.mem_alloc(MIB)
            except CudaError as error:
                codes.append(error.code)
            with driver.on(1):
                driver.mem_free(pointer)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert codes == [201]

    def test_memory(self, fake: FakeCuda, driver: Driver) -> None:
        """Allocated memory would leak, or its size not be known."""
        pointer = driver.mem_alloc(3 * MIB)
        assert driver.address_range(pointer + MIB) == (pointer, 3 * MIB)
        assert fake.allocated_bytes() == {os.getpid(): 3 * MIB}
        with fails(2):
            driver.mem_alloc(254 * MIB)
        driver.mem_free(pointer)
        assert not fake.allocated_bytes()
        with fails(1):
            driver.mem_free(pointer)

    def test_copies_of_any_kind(self, driver: Driver) -> None:
        """Bytes would change on the way through a GPU."""
        data = random.Random(0).randbytes(MIB)
        source, target = Buffer(data), Buffer(bytes(MIB))
        pointer = driver.mem_alloc(2 * MIB)
        stream = driver.stream_create()
        driver.copy_async(pointer, source.address, MIB, stream)
        driver.copy_async(pointer + MIB, pointer, MIB, stream)
        driver.copy_async(target.address, pointer + MIB, MIB, stream)
        event = driver.event_create(interprocess=False)
        driver.event_record(event, stream)
        driver.event_synchronize(event)
        assert bytes(target) == data
        driver.event_destroy(event)
        driver.stream_destroy(stream)
        driver.mem_free(pointer)

    def test_registered_memory(self, fake: FakeCuda, driver: Driver) -> None:
        """Pinned host memory would leak, or be pinned twice."""
        buffer = Buffer(bytes(4 * MIB))
        driver.host_register(buffer.address, 2 * MIB)
        driver.host_register(buffer.address + 2 * MIB, 2 * MIB)
        assert fake.registered_bytes() == {os.getpid(): 4 * MIB}
        with fails(712):
            driver.host_register(buffer.address + MIB, 4096)
        driver.host_unregister(buffer.address)
        with fails(713):
            driver.host_unregister(buffer.address)
        assert fake.registered_bytes() == {os.getpid(): 2 * MIB}
        driver.host_unregister(buffer.address + 2 * MIB)


class TestStreams:
    def test_copies_happen_later(self, fake: FakeCuda, driver: Driver) -> None:
        """Code that forgets to wait for a copy would pass its tests."""
        fake.delay("copy", 0.3)
        source, target = Buffer(b"x" * 100), Buffer(bytes(100))
        event = driver.event_create(interprocess=False)
        assert driver.event_query(event), "an event that was never recorded is done"
        driver.copy_async(target.address, source.address, 100, 0)
        driver.event_record(event, 0)
        assert not driver.event_query(event)
        assert bytes(target) == bytes(100)
        driver.event_synchronize(event)
        assert driver.event_query(event)
        assert bytes(target) == b"x" * 100

    def test_one_stream_waits_for_another(self, fake: FakeCuda, driver: Driver) -> None:
        """Code that orders its streams wrongly would pass its tests."""
        first, second = driver.stream_create(), driver.stream_create()
        source, middle, target = Buffer(b"x" * 100), Buffer(bytes(100)), Buffer(bytes(100))
        event = driver.event_create(interprocess=False)
        fake.delay("copy", 0.2)
        driver.copy_async(middle.address, source.address, 100, first)
        driver.event_record(event, first)
        driver.stream_wait_event(second, event)
        driver.event_record(event, first)
        driver.copy_async(target.address, middle.address, 100, second)
        driver.context_synchronize()
        assert bytes(target) == b"x" * 100

    def test_streams_run_side_by_side(self, fake: FakeCuda, driver: Driver) -> None:
        """A client that waits for another would not be noticed."""
        first, second = driver.stream_create(), driver.stream_create()
        source, target = Buffer(b"x" * 100), Buffer(bytes(100))
        done = [driver.event_create(interprocess=False) for _ in range(2)]
        fake.hang("record")
        driver.event_record(done[0], first)
        driver.copy_async(target.address, source.address, 100, second)
        eventually(lambda: bytes(target) == b"x" * 100)
        assert not driver.event_query(done[0])
        fake.heal()
        driver.event_synchronize(done[0])

    def test_a_copy_out_of_its_registered_range(self, driver: Driver) -> None:
        """A copy over the border of two registrations, which a real driver refuses, would pass."""
        buffer, other = Buffer(bytes(2 * MIB)), Buffer(bytes(2 * MIB))
        driver.host_register(buffer.address, MIB)
        with fails(1):
            driver.copy_async(buffer.address + MIB - 10, other.address, 11, 0)
        driver.copy_async(buffer.address + MIB - 10, other.address, 10, 0)
        driver.copy_async(other.address, buffer.address + MIB, MIB, 0)
        driver.context_synchronize()
        driver.host_unregister(buffer.address)


class TestIpc:
    def test_memory(self, fake: FakeCuda, driver: Driver, other: Other) -> None:
        """Two processes would not see the same device memory."""
        data = random.Random(1).randbytes(MIB)
        source, target = Buffer(data), Buffer(bytes(MIB))
        pointer = driver.mem_alloc(2 * MIB)
        driver.copy_async(pointer, source.address, MIB, 0)
        driver.context_synchronize()
        handle = driver.ipc_mem_handle(pointer)
        assert len(handle) == 64
        with fails(201):
            driver.ipc_open_mem(handle)
        there = other.ask(f"driver.ipc_open_mem({handle!r})")
        assert other.ask(f"driver.ipc_open_mem({handle!r})") == there
        assert other.ask(f"driver.address_range({there})") == (there, 2 * MIB)
        assert fake.open_handles() == {other.process.pid: 2}
        other.ask(f"driver.copy_async({there + MIB}, {there}, {MIB}, 0)")
        other.ask("driver.context_synchronize()")
        driver.copy_async(target.address, pointer + MIB, MIB, 0)
        driver.context_synchronize()
        assert bytes(target) == data
        assert other.ask(f"driver.ipc_close_mem({there})") is None
        assert fake.open_handles() == {other.process.pid: 1}
        other.ask(f"driver.ipc_close_mem({there})")
        assert not fake.open_handles()
        assert other.ask(f"driver.ipc_close_mem({there})") == 1
        driver.mem_free(pointer)
        assert other.ask(f"driver.ipc_open_mem({handle!r})") == 400
        assert fake.violations() == []

    def test_a_handle_of_nothing(self, driver: Driver, other: Other) -> None:
        """A daemon that does not expect bad handles would pass its tests."""
        assert other.ask("driver.ipc_open_mem(bytes(64))") == 400
        assert other.ask("driver.ipc_open_event(bytes(64))") == 400
        with pytest.raises(ValueError, match="63 bytes"):
            driver.ipc_open_mem(bytes(63))

    def test_on_another_gpu(self, driver: Driver, other: Other) -> None:
        """A daemon that mixes its GPUs up would pass its tests."""
        with driver.on(1):
            pointer = driver.mem_alloc(MIB)
            handle = driver.ipc_mem_handle(pointer)
            assert other.ask(f"driver.ipc_open_mem({handle!r})") == 101
            driver.mem_free(pointer)

    def test_freed_while_open(self, fake: FakeCuda, driver: Driver, other: Other) -> None:
        """A detach that is not acknowledged, a crash with a real driver, would pass its tests."""
        pointer = driver.mem_alloc(MIB)
        handle = driver.ipc_mem_handle(pointer)
        other.ask(f"driver.ipc_open_mem({handle!r})")
        driver.mem_free(pointer)
        (violation,) = fake.violations()
        assert f"pid {os.getpid()} freed" in violation
        assert f"pid {other.process.pid} has open" in violation

    def test_a_dead_process_holds_nothing(
        self, fake: FakeCuda, driver: Driver, other: Other
    ) -> None:
        """Leaks would be reported of processes that the kernel has cleaned up after."""
        theirs = other.ask("driver.mem_alloc(4096)")
        handle = other.ask(f"driver.ipc_mem_handle({theirs})")
        pointer = driver.mem_alloc(MIB)
        other.ask(f"driver.ipc_open_mem({driver.ipc_mem_handle(pointer)!r})")
        other.ask(f"driver.host_register({1 << 40}, 4096)")
        assert other.process.pid in fake.open_handles()
        other.process.kill()
        eventually(lambda: not fake.open_handles())
        assert other.process.pid not in fake.registered_bytes() + fake.allocated_bytes()
        driver.mem_free(pointer)
        assert fake.violations() == []
        with fails(400):
            driver.ipc_open_mem(handle)

    def test_an_event(self, fake: FakeCuda, driver: Driver, other: Other) -> None:
        """A copy in one process would not wait for the work of the other."""
        event = driver.event_create(interprocess=True)
        there = other.ask(f"driver.ipc_open_event({driver.ipc_event_handle(event)!r})")
        assert other.ask(f"driver.event_query({there})") is True
        fake.hang("record")
        driver.event_record(event, 0)
        assert other.ask(f"driver.event_query({there})") is False
        mine = other.ask("driver.event_create(interprocess=False)")
        stream = other.ask("driver.stream_create()")
        other.ask(f"driver.stream_wait_event({stream}, {there})")
        fake.heal()
        other.ask(f"driver.event_record({mine}, {stream})")
        other.ask(f"driver.event_synchronize({mine})")
        assert driver.event_query(event)
        with fails(201):
            driver.ipc_open_event(driver.ipc_event_handle(event))
        other.ask(f"driver.event_destroy({there})")
        driver.event_destroy(event)

    def test_a_local_event_has_no_handle(self, driver: Driver) -> None:
        """An event that no other process can open would be exported."""
        event = driver.event_create(interprocess=False)
        with fails(400):
            driver.ipc_event_handle(event)


class TestFaults:
    def test_the_nth_call_fails(self, fake: FakeCuda, driver: Driver) -> None:
        """A test of a failure would test the success."""
        fake.fail("cuMemAlloc_v2", 2, times=2, after=1)
        pointers = [driver.mem_alloc(4096)]
        for _ in range(2):
            with fails(2):
                driver.mem_alloc(4096)
        pointers.append(driver.mem_alloc(4096))
        for pointer in pointers:
            driver.mem_free(pointer)

    def test_a_call_that_hangs(self, fake: FakeCuda, driver: Driver, other: Other) -> None:
        """A stuck process would not be stuck."""
        fake.hang("cuMemAlloc_v2")
        asked = threading.Thread(target=other.ask, args=["driver.mem_alloc(4096)"])
        asked.start()
        driver.mem_get_info()
        assert not fake.allocated_bytes()
        assert asked.is_alive()
        fake.heal()
        asked.join(20)
        assert not asked.is_alive()

    def test_a_failed_copy_spoils_the_process(
        self, fake: FakeCuda, driver: Driver, other: Other
    ) -> None:
        """A context that a real driver gives up would go on working."""
        fake.fail("copy", 719)
        first, second = (other.ask("driver.mem_alloc(4096)") for _ in range(2))
        other.ask(f"driver.copy_async({first}, {second}, 4096, 0)")
        assert other.ask("driver.context_synchronize()") == 719
        assert other.ask("driver.mem_get_info()") == 719
        driver.mem_get_info()
