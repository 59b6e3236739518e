"""The options' limits, and the defaults that depend on the machine."""

from pathlib import Path
from typing import Any

import pytest

from discod.config import (
    DISK_SHARE,
    RAM_SHARE,
    BadOption,
    Config,
    default_disk_bytes,
    default_ram_bytes,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"scratch": ()}, "--scratch"),
        ({"threads": 1}, "--threads 1"),
        ({"threads": 100_000}, "at most 256"),
        ({"chunk_bytes": 4097}, "--chunk 4097"),
        ({"chunk_bytes": 0}, "--chunk 0"),
        ({"chunk_bytes": GIB + 4096}, "--chunk"),
        ({"exit_idle_seconds": -1.0}, "--exit-idle"),
        ({"exit_idle_seconds": float("nan")}, "--exit-idle nan"),
        ({"exit_idle_seconds": float("inf")}, "--exit-idle inf"),
        ({"ram_bytes": 4095}, "--ram"),
        ({"disk_bytes": 1}, "--disk"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], named: str) -> None:
    """A daemon would start that cannot serve, and fail at the first request."""
    with pytest.raises(BadOption, match=named):
        Config(**{"scratch": (Path("/s"),), "socket_dir": Path("/r")} | wrong)


def machine(root: Path, available_gib: int, groups: dict[str, tuple[str, int, int]]) -> Path:
    """A root with /proc and /sys: per cgroup its limit, use and inactive page cache in GiB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 999999999 kB\nMemAvailable: {available_gib * GIB // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text("4:memory:/v1\n0::/job/task\n")
    for name, (limit, used_gib, inactive_gib) in groups.items():
        group = root / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(f"{used_gib * GIB}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_gib * GIB}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "free_gib"),
    [
        ({}, 64),
        ({"job/task": ("max", 1, 0)}, 64),
        ({"job/task": (str(16 * GIB), 4, 2)}, 14),
        ({"job": (str(8 * GIB), 4, 0), "job/task": (str(16 * GIB), 4, 0)}, 4),
        ({"other": (str(GIB), 0, 0)}, 64),
    ],
)
def test_memory_under_the_cgroups_limits(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], free_gib: int
) -> None:
    """In a container arenas would be sized for the whole node, and the trainers be killed."""
    assert default_ram_bytes(machine(tmp_path, 64, groups)) == int(free_gib * GIB * RAM_SHARE)


@pytest.mark.parametrize(
    ("groups", "free_gib"),
    [
        ({"process_api/job": (1 << 63, 1, 0)}, 64),
        ({"process_api/job": (16 * GIB, 4, 2)}, 14),
        ({"process_api": (8 * GIB, 4, 0), "process_api/job": (16 * GIB, 4, 0)}, 4),
        # In a container: the host's path does not exist there, its group is at the top.
        ({"": (6 * GIB, 1, 0)}, 5),
        ({"other": (GIB, 0, 0)}, 64),
    ],
)
def test_memory_under_the_limits_of_version_1(
    tmp_path: Path, groups: dict[str, tuple[int, int, int]], free_gib: int
) -> None:
    """On hosts with the old cgroups the same, though /proc lists a version 2 beside them."""
    root = machine(tmp_path, 64, {})
    (root / "proc/self/cgroup").write_text(
        "9:name=systemd:/\n5:cpu,cpuacct:/\n4:hugetlb,memory:/process_api/job\n0::/\n"
    )
    for name, (limit, used_gib, inactive_gib) in groups.items():
        group = root / "sys/fs/cgroup/memory" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text(f"{used_gib * GIB}\n")
        stat = f"inactive_file 999999999999\ntotal_inactive_file {inactive_gib * GIB}\n"
        (group / "memory.stat").write_text(stat)
    assert default_ram_bytes(root) == int(free_gib * GIB * RAM_SHARE)


def test_memory_of_this_machine() -> None:
    """The default would be nothing on a real machine."""
    assert default_ram_bytes() > 1 << 20


def test_a_device_counts_once() -> None:
    """Two directories on one disk would be taken for twice its space."""
    free = [(1, 100 * GIB), (1, 100 * GIB), (2, 10 * GIB)]
    assert default_disk_bytes(free) == pytest.approx(110 * GIB * DISK_SHARE, abs=4096)
