"""The checks of ``discod doctor`` for machines that are not at hand: given roots, given answers."""

import ctypes
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from discod.block_device import BlockDevice, block_device
from discod.checkup import daemon, gpu, kernel, quotas, scratch
from discod.checkup.container import check_container
from discod.checkup.finding import Finding
from discod.checkup.memory import check_memory

GIB = 1 << 30
KIB_OF_GIB = 1 << 20


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def machine(root: Path, *, swap_used: int = 0, limit: int | None = None) -> Path:
    """A root with 8 GiB of memory and of swap, in a cgroup with a limit."""
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {8 * KIB_OF_GIB} kB\nMemAvailable: {6 * KIB_OF_GIB} kB\n"
        f"SwapTotal: {8 * KIB_OF_GIB} kB\nSwapFree: {8 * KIB_OF_GIB - swap_used // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text("0::/job\n")
    if limit is not None:
        (root / "sys/fs/cgroup/job/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/job/memory.current").write_text(f"{limit // 2}\n")
        (root / "sys/fs/cgroup/job/memory.stat").write_text("anon 0\ninactive_file 0\n")
    return root


def test_memory_without_limits(tmp_path: Path) -> None:
    """A machine with enough of all would be found fault with."""
    found = by_check(list(check_memory(machine(tmp_path))))
    assert {finding.level for finding in found.values()} == {"ok"}
    assert "6.0 GiB are available; without --ram the daemon takes up to 3.0 GiB" in (
        found["memory"].found
    )
    assert found["cgroup"].found.startswith("no memory limit")


@pytest.mark.parametrize(("limit", "level"), [(GIB, "warn"), (6 * GIB, "ok")])
def test_a_cgroup_limit(tmp_path: Path, limit: int, level: str) -> None:
    """A container's limit would be seen first when the kernel kills the daemon."""
    found = by_check(list(check_memory(machine(tmp_path, limit=limit))))
    assert found["cgroup"].level == level
    assert f"a memory limit of {limit // GIB}.0 GiB" in found["cgroup"].found
    assert found["memory"].level == level


def test_a_limit_above_the_memory_is_none(tmp_path: Path) -> None:
    """Version 1 of cgroups says 2^63 where there is no limit, and so would we."""
    found = by_check(list(check_memory(machine(tmp_path, limit=1 << 62))))
    assert found["cgroup"].found.startswith("no memory limit")


def test_swap_in_use(tmp_path: Path) -> None:
    """Arenas would be swapped out, and nobody know why training is slow."""
    found = by_check(list(check_memory(machine(tmp_path, swap_used=4 * GIB))))
    assert found["swap"].level == "warn"
    assert found["swap"].found.startswith("4.0 GiB of 8.0 GiB are used")


def disk(sys_dir: Path, name: str, *, rotational: str | None, partition: str = "") -> int:
    """A disk in a /sys of ours; its number, or its partition's."""
    place = sys_dir / "devices/pci0" / name
    (place / partition).mkdir(parents=True)
    if rotational is not None:
        (place / "queue").mkdir()
        (place / "queue/rotational").write_text(f"{rotational}\n")
    (sys_dir / "dev/block").mkdir(parents=True)
    (sys_dir / "dev/block/259:1").symlink_to(place / partition)
    return os.makedev(259, 1)


@pytest.mark.parametrize(
    ("rotational", "partition", "wanted"),
    [
        ("0", "nvme0n1p2", BlockDevice("nvme0n1p2", False)),
        ("1", "", BlockDevice("nvme0n1", True)),
        (None, "", BlockDevice("nvme0n1", None)),
    ],
)
def test_block_device(
    tmp_path: Path, rotational: str | None, partition: str, wanted: BlockDevice
) -> None:
    """A partition of a hard disk would be taken for flash, or the other way round."""
    number = disk(tmp_path, "nvme0n1", rotational=rotational, partition=partition)
    assert block_device(number, tmp_path) == wanted
    assert block_device(os.makedev(0, 40), tmp_path) is None


@pytest.mark.parametrize(
    ("found", "level", "part"),
    [
        (BlockDevice("nvme0n1", False), "ok", "nvme0n1, NVMe"),
        (BlockDevice("vdb", None), "ok", "not NVMe by its name"),
        (BlockDevice("sda", True), "warn", "sda says that it rotates"),
        (None, "ok", "not known"),
    ],
)
def test_what_is_said_of_a_device(
    monkeypatch: pytest.MonkeyPatch, found: BlockDevice | None, level: str, part: str
) -> None:
    """A hard disk would pass for a scratch disk."""
    monkeypatch.setattr(scratch, "block_device", lambda number: found)
    finding = scratch._device(1, "ext4", "/nvme")
    assert finding.level == level
    assert part in finding.found


class Quotas:
    """In place of the kernel: quotas of 20 GiB for users, of which 12 are used, and none for
    groups."""

    def syscall(self, number: int, fd: object, command: object, uid: object, out: object) -> int:
        assert number == 443
        kind = getattr(command, "value", 0) & 0xFF
        if kind == 1:
            ctypes.set_errno(errno.ESRCH)
            return -1
        quota = out._obj  # type: ignore[attr-defined]  # what byref() refers to
        quota.hard, quota.soft, quota.used_bytes = 20 * KIB_OF_GIB, 0, 12 * GIB
        return 0


def test_a_quota_of_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's quota would be met in the middle of a run, on a disk with much space."""
    monkeypatch.setattr(quotas, "_libc", Quotas())
    assert list(quotas.room_by_quota(0)) == [(f"uid {os.geteuid()}", 8 * GIB)]
    (finding,) = scratch._quota(0, "/nvme")
    assert finding.level == "warn"
    assert "leaves uid" in finding.found


def test_no_quota_here(tmp_path: Path) -> None:
    """The real call would crash, or give a limit where there is none."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert all(free >= 0 for _, free in quotas.room_by_quota(fd))
    finally:
        os.close(fd)


def test_gpus_without_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with GPUs and without the driver's libraries would look like one without GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("DISCOD_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).write_text("")
    seen = gpu.look_for_gpus(tmp_path)
    assert [node.name for node in seen.nodes] == ["nvidia0", "nvidia1"]
    (finding,) = gpu.check_gpus(seen)
    assert finding.level == "warn"
    assert "2 under /dev" in finding.found
    assert "/nowhere/libcuda.so.1" in finding.found
    assert "--gpus all" in finding.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = gpu.check_gpus(seen)
    assert "hides all" in finding.found


def test_namespaces_that_are_not_known(tmp_path: Path) -> None:
    """A sandbox without /proc/self/ns would be called a container, or crash."""
    (finding,) = check_container(tmp_path)
    assert finding.level == "ok"
    assert "no container" in finding.found


def test_a_user_namespace(tmp_path: Path) -> None:
    """Who looks for their uid in the daemon's log would look for the wrong one."""
    own = tmp_path / "proc/self/ns"
    own.mkdir(parents=True)
    (own / "user").symlink_to("user:[4026532000]")
    (tmp_path / "proc/self/uid_map").write_text("         0       1000          1\n")
    if os.geteuid() == 0:
        assert (
            "uid 0 here is uid 1000 outside"
            in by_check([*check_container(tmp_path)])["users"].found
        )


def test_neither_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel, on which a forked child keeps a dead trainer's memory, would pass."""
    monkeypatch.setattr(kernel, "_tried", lambda make: "Function not implemented")
    finding = kernel._pidfd()
    assert finding.level == "warn"
    assert "Function not implemented" in finding.found


def test_a_directory_out_of_use() -> None:
    """A disk that has failed under a running daemon would look like a good one."""
    status = {"path": "/nvme", "in_use": False, "last_failure": "write: EIO", "free_bytes": 1}
    finding = daemon._scratch(status)
    assert (finding.level, finding.found) == ("fail", "out of use: write: EIO")
    finding = daemon._scratch(status | {"in_use": True, "direct": False, "fs_type": "ramfs"})
    assert (finding.level, finding.subject) == ("warn", "/nvme")


ERRANDS = """
import os, signal, time
from discod.checkup.errand import Errand
from discod.checkup.finding import ok

def hang():
    signal.pause()

def crash():
    os.kill(os.getpid(), signal.SIGKILL)

def fail():
    raise ValueError("odd")

def succeed():
    print("not for the user")
    return [ok("x", "y" * 100_000, "z")], 7

errands = [Errand("a check", function, "/s") for function in (hang, crash, fail, succeed)]
deadline = time.monotonic() + 0.5
for errand in errands:
    findings, number = errand.wait(deadline)
    print(number, *(f"{f.check}|{f.level}|{f.found[:60]}|{f.subject}" for f in findings))
"""


def test_errands() -> None:
    """One check that hangs or crashes would take the others with it, or the command."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", ERRANDS], capture_output=True, text=True, timeout=30, check=True
    )
    assert time.monotonic() - began < 10
    assert ended.stderr == ""
    hung, crashed, failed, succeeded = ended.stdout.splitlines()
    assert hung.startswith("0 a check|fail|no answer within 0.")
    assert crashed == "0 a check|warn|could not be checked: its process has crashed|/s"
    assert failed == "0 a check|warn|could not be checked: ValueError: odd|/s"
    assert succeeded == f"7 x|ok|{'y' * 60}|z"


def test_what_it_loads() -> None:
    """It would take seconds, and not run where the daemon alone is installed."""
    code = (
        "import sys; import discod.checkup.run, discod.commands.doctor; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'zmq', 'rich')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
