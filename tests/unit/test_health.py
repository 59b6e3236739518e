"""Which failures take a directory out of use, and how it comes back."""

import errno
import threading
from collections.abc import Iterator

import pytest

from discod import health
from discod.health import DEVICE_ERRORS, Health, Outages
from discod.loop import Loop


class Disk:
    """A directory whose probe fails as often as ``failures`` has errors left."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.health = Health()
        self.failures: list[OSError] = []
        self.checks = 0
        self.checked_in: set[str] = set()

    def check(self) -> None:
        self.checks += 1
        self.checked_in.add(threading.current_thread().name)
        if self.failures:
            raise self.failures.pop()

    def fail(self, code: int = errno.EIO) -> bool:
        return self.health.note(OSError(code, "injected"), f"write failed (errno {code})")

    def __str__(self) -> str:
        return self.name


class Machine:
    """Two disks and the loop that their probes run on."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.disks = [Disk("a"), Disk("b")]
        self.outages = Outages(self.disks, self.loop)

    def in_use(self) -> list[bool]:
        return [disk.health.in_use for disk in self.disks]

    def run_until_all_are_in_use(self) -> None:
        late = self.loop.call_later(10, self.loop.stop)

        def look() -> None:
            if all(self.in_use()):
                self.loop.stop()
            else:
                self.loop.call_later(0.001, look)

        look()
        self.loop.run(lambda: False)
        late.cancel()
        assert self.in_use() == [True, True]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.01)
    machine = Machine()
    yield machine
    if machine.outages._prober is not None:
        machine.outages._prober.stop()
    machine.loop.close()


@pytest.mark.parametrize("code", sorted(DEVICE_ERRORS))
def test_a_failing_device(machine: Machine, code: int) -> None:
    """Every blob would be tried on a dead disk first."""
    one, two = machine.disks
    assert not one.fail(code)
    assert machine.in_use() == [False, True]
    assert f"errno {code}" in one.health.last_failure
    assert two.health.last_failure == ""
    machine.run_until_all_are_in_use()


@pytest.mark.parametrize(
    "code",
    [
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.ENOMEM,
        errno.EFAULT,
        errno.EINVAL,
        errno.EMFILE,
    ],
)
def test_what_is_not_the_devices_fault(machine: Machine, code: int) -> None:
    """A full disk would count as broken; or a client could take a disk away from all others."""
    assert machine.disks[0].fail(code)
    assert machine.in_use() == [True, True]
    assert machine.disks[0].health.last_failure == ""


def test_the_last_one_stays(machine: Machine) -> None:
    """With all disks refused, not even what happens to work would be used."""
    one, two = machine.disks
    one.fail()
    assert two.fail(errno.EROFS)
    assert machine.in_use() == [False, True]
    assert f"errno {errno.EROFS}" in two.health.last_failure
    machine.run_until_all_are_in_use()
    assert not two.fail()
    assert machine.in_use() == [True, False]


def test_racing_failures_leave_one(machine: Machine) -> None:
    """Two disks that fail in the same instant, in two threads, would both be gone."""
    for _ in range(100):
        barrier = threading.Barrier(2)

        def fail(disk: Disk, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            disk.fail()

        threads = [threading.Thread(target=fail, args=(disk,)) for disk in machine.disks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(machine.in_use()) == 1
        for disk in machine.disks:
            disk.health.in_use = True


def test_back_when_a_probe_succeeds(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that was replaced would stay unused until the daemon is started again; or nobody
    would know, or the log be full of it."""
    one, _ = machine.disks
    one.failures = [OSError(errno.EIO, "injected"), *[OSError(errno.ENXIO, "injected")] * 3]
    with caplog.at_level("INFO", logger="discod"):
        for _ in range(5):
            one.fail()
        machine.run_until_all_are_in_use()
    assert one.checks == 5
    assert one.checked_in == {"chores"}, "the event loop has waited for a disk"
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0].split(",")[0] for line in said] == [
        "scratch a is out of use",
        "scratch a stays out of use",
        "scratch a stays out of use",
        "scratch a works",
    ]
    assert "errno 5" in said[0]
