"""``discod doctor``: what it says of real file systems, daemons, limits and users."""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from discod import __version__
from discod.exits import Exit
from discod.wire import PROTOCOL_VERSION
from discod.wire.paths import ATTACH_SOCKET, IO_SOCKET
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.jobs import ROOT
from tests.helpers.mounts import ext4, mounted
from tests.helpers.users import as_user
from tests.integration.conftest import privileged_or_skip

Start = Callable[..., Daemon]

BUSY_SECONDS = 8.0
"""It is to be done in 2 s; other tests run beside."""

STRANGER, SERVICE, GROUP = 23456, 12345, 34567


class Report:
    """What one run has said.

    Args:
        text: Its JSON.
        code: Its exit code.
    """

    def __init__(self, text: str, code: int) -> None:
        said = json.loads(text)
        self.code = code
        self.counts = said["counts"]
        self.findings = {(f["subject"], f["check"]): f for f in said["findings"]}
        assert len(self.findings) == len(said["findings"]), "two findings of one name"
        for finding in said["findings"]:
            assert (finding["level"] == "ok") == (not finding["remedy"]), finding

    def says(self, check: str, level: str, *parts: object, subject: object = "") -> None:
        """The check ended so, and its text has all of these."""
        finding = self.findings[str(subject), check]
        assert finding["level"] == level, finding
        for part in parts:
            assert str(part) in f"{finding['found']} -> {finding['remedy']}", finding


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that other users can reach."""
    path = Path(tempfile.mkdtemp(prefix="dc-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def doctor(
    *options: object, prefix: Sequence[str] = (), env: dict[str, str] | None = None
) -> Report:
    """Run it."""
    command = [*prefix, sys.executable, "-m", "discod", "doctor", "--json", *map(str, options)]
    began = time.monotonic()
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"} | (env or {}),
        cwd="/",
    )
    assert ended.stderr == ""
    assert time.monotonic() - began < BUSY_SECONDS
    return Report(ended.stdout, ended.returncode)


def names(*directories: Path) -> list[str]:
    return [entry.name for directory in directories for entry in directory.iterdir()]


def test_beside_a_daemon(daemon: Daemon, scratch: Path) -> None:
    """It would find fault where there is none, or leave something behind."""
    before = names(scratch, daemon.socket_dir)
    report = doctor("--scratch", scratch, "--socket-dir", daemon.socket_dir)
    assert names(scratch, daemon.socket_dir) == before
    assert report.counts["fail"] == 0
    assert report.code == Exit.OK
    for check in ("writable", "O_TMPFILE", "O_DIRECT"):
        report.says(check, "ok", subject=scratch)
    report.says("in use", "ok", f"pid {daemon.pid}", subject=scratch)
    report.says("daemon", "ok", __version__, f"pid {daemon.pid}", f"uid {os.geteuid()}")
    report.says("versions", "ok", __version__, f"protocol {PROTOCOL_VERSION}")
    report.says("access", "ok", f"uid {os.geteuid()} may attach")
    report.says("the daemon's", "ok", "in use with O_DIRECT", subject=scratch)
    report.says("client", "ok", ROOT / "client/disco_client", ROOT / "discod")
    for check in ("memfd", "huge pages", "pidfd", "credentials", "/dev/shm", "arenas"):
        report.says(check, "ok")
    assert daemon.status()["clients"] == []


def test_file_systems(tmp_path: Path, short_dir: Path) -> None:
    """What does harm as a scratch directory, or cannot be one, would pass; /sys may be missing."""
    privileged_or_skip("mounting")
    at = {name: tmp_path / name for name in ("ram", "old", "ro", "full", "layer", "file", "gone")}
    for name in ("ram", "old", "ro", "full", "layer"):
        at[name].mkdir()
    at["file"].write_text("")
    for name in ("lower", "upper"):
        (tmp_path / name).mkdir()
    upper = tmp_path / "upper"
    prefix = mounted(
        f"mount -t tmpfs none {at['ram']} && mount -t ramfs none {at['old']} && "
        f"mount -t tmpfs -o ro none {at['ro']} && mount -t tmpfs none {upper} && "
        f"mkdir {upper}/up {upper}/work && mount -t overlay none -o "
        f"lowerdir={tmp_path / 'lower'},upperdir={upper}/up,workdir={upper}/work {at['layer']} && "
        "mount -t tmpfs none /sys"
    )
    disk = ext4(tmp_path / "image", at["full"], 24)
    fill = mounted(f"dd if=/dev/zero of={at['full']}/filler bs=64k 2>/dev/null; true")
    options = [word for path in at.values() for word in ("--scratch", str(path))]
    report = doctor(*options, "--socket-dir", short_dir, prefix=[*disk, *fill, *prefix])
    assert report.code == Exit.CHECKS_FAILED
    report.says("file system", "fail", "tmpfs, which is memory", subject=at["ram"])
    report.says("file system", "fail", "ramfs", subject=at["old"])
    report.says("O_DIRECT", "warn", "page cache", "ext4 or xfs", subject=at["old"])
    report.says("writable", "fail", "tmpfs is mounted read-only", subject=at["ro"])
    report.says("file system", "warn", "overlay", "mount a directory", subject=at["layer"])
    report.says("file system", "ok", "ext4", subject=at["full"])
    report.says("space", "fail", "are free", "free some space", subject=at["full"])
    report.says("reservation", "fail", "No space left on device", subject=at["full"])
    report.says("device", "ok", "not known", subject=at["full"])
    report.says("directory", "fail", "it is no directory", subject=at["file"])
    report.says("directory", "fail", "does not exist", f"mkdir -p {at['gone']}", subject=at["gone"])


def test_a_little_space_is_a_warning(tmp_path: Path, short_dir: Path) -> None:
    """A disk for one step of a toy would be called good, or a small one useless."""
    privileged_or_skip("mounting")
    place = tmp_path / "disk"
    place.mkdir()
    prefix = ext4(tmp_path / "image", place, 600)
    options = ("--scratch", place, "--socket-dir", short_dir)
    report = doctor(*options, prefix=prefix)
    report.says("space", "warn", "only 5", "MiB are free", subject=place)
    assert report.code == Exit.OK
    assert doctor(*options, "--strict", prefix=prefix).code == Exit.CHECKS_FAILED


@contextmanager
def hung_mount(point: Path) -> Iterator[Path]:
    """The path of a file system that answers nothing."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")  # no privilege would help
    point.mkdir()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.helpers.hung_fuse", str(point)]
    with here, there, subprocess.Popen(command, stdin=there, cwd=ROOT) as server:
        there.close()
        # Its fds are left where they are: a child of this process would close them, and hang.
        assert select.select([here], [], [], 20)[0]
        try:
            yield Path(f"/proc/{server.pid}/root{point}")
        finally:
            here.send(b".")


def test_a_file_system_that_hangs(tmp_path: Path, scratch: Path, short_dir: Path) -> None:
    """The command that is to find the dead NFS server would hang on it, and say nothing."""
    privileged_or_skip("mounting")
    with hung_mount(tmp_path / "hung") as hung:
        options = ("--scratch", hung, "--scratch", scratch, "--socket-dir", short_dir)
        report = doctor(*options)
    report.says("scratch", "fail", "no answer within", "dmesg", subject=hung)
    report.says("O_DIRECT", "ok", subject=scratch)


def test_no_scratch_is_said(short_dir: Path) -> None:
    """A script would take "nothing wrong" for "the disk is good"; the environment counts too."""
    report = doctor("--socket-dir", short_dir)
    report.says("directory", "warn", "none was given", "--scratch")
    named = doctor("--socket-dir", short_dir, env={"DISCOD_SCRATCH": "/nowhere:/nowhere2"})
    for path in ("/nowhere", "/nowhere2"):
        named.says("directory", "fail", "does not exist", subject=path)


def test_a_daemon_that_was_killed(daemon: Daemon) -> None:
    """A user would look at sockets, and wonder why nobody answers."""
    daemon.kill()
    report = doctor("--socket-dir", daemon.socket_dir)
    report.says("daemon", "warn", "killed", f"{ATTACH_SOCKET}, {IO_SOCKET}", "discod --scratch DIR")
    assert report.code == Exit.OK


def test_no_daemon(short_dir: Path) -> None:
    """The first reason for errors of trainers would not be said."""
    missing = short_dir / "not" / "there"
    report = doctor("--socket-dir", missing)
    report.says("daemon", "warn", f"none runs on {missing}", "DISCOD_SCRATCH")
    report.says("socket directory", "ok", "the daemon makes it")
    long = short_dir / ("x" * 100)
    report = doctor("--socket-dir", long)
    report.says("socket directory", "fail", "107", "shorter --socket-dir")


def test_a_daemon_that_is_stopped(daemon: Daemon) -> None:
    """The command would hang with the daemon that it is to look at."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        report = doctor("--socket-dir", daemon.socket_dir)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    report.says("daemon", "fail", "has not answered within 1 s", "kill -CONT")
    assert report.code == Exit.CHECKS_FAILED


def test_a_daemon_of_another_version(start_daemon: Start) -> None:
    """A client that is refused for its version would have its user search elsewhere."""
    other = str(ROOT / "tests/helpers/other_version.py")
    prefix = [sys.executable, other, "99.1", str(PROTOCOL_VERSION)]
    daemon = start_daemon(prefix=prefix)
    report = doctor("--socket-dir", daemon.socket_dir)
    report.says("versions", "warn", "99.1", __version__, "restart the daemon")
    daemon.close()
    daemon = start_daemon(prefix=[sys.executable, other, "99.2", "77"], ready=False)
    eventually(lambda: "serves" in daemon.log, 20)
    report = doctor("--socket-dir", daemon.socket_dir)
    report.says("daemon", "fail", "99.2", "protocol 77", "same version")


def test_a_directory_in_use_by_another_daemon(
    daemon: Daemon, scratch: Path, short_dir: Path
) -> None:
    """A second daemon would be started on it, and fail."""
    report = doctor("--scratch", scratch, "--socket-dir", short_dir)
    report.says("in use", "warn", f"another daemon, pid {daemon.pid}", subject=scratch)


def test_another_user(open_dir: Path, start_daemon: Start) -> None:
    """A user would not learn that it is permissions that keep them out, nor whom to ask."""
    privileged_or_skip("other users")
    for name in ("scratch", "sockets"):
        (open_dir / name).mkdir(mode=0o755)
    daemon = start_daemon(scratch=open_dir / "scratch", socket_dir=open_dir / "sockets")
    options = ("--scratch", open_dir / "scratch", "--socket-dir", daemon.socket_dir)
    report = doctor(*options, prefix=as_user(STRANGER))
    report.says("writable", "fail", f"uid {STRANGER} may not write", subject=open_dir / "scratch")
    report.says("daemon", "fail", f"uid {STRANGER} may not connect", "mode 0600", "--allow-group")
    report.says("memfd", "ok")
    assert report.code == Exit.CHECKS_FAILED


def test_a_service_and_its_group(open_dir: Path, start_daemon: Start) -> None:
    """Members of the group would be told that they cannot use it, or root that it can."""
    privileged_or_skip("other users")
    for name in ("scratch", "sockets"):
        (open_dir / name).mkdir()
        (open_dir / name).chmod(0o755)
        os.chown(open_dir / name, SERVICE, SERVICE)
    daemon = start_daemon(
        *("--allow-group", str(GROUP)),
        scratch=open_dir / "scratch",
        socket_dir=open_dir / "sockets",
        prefix=as_user(SERVICE, SERVICE, [GROUP]),
    )
    member = doctor("--socket-dir", daemon.socket_dir, prefix=as_user(STRANGER, groups=[GROUP]))
    member.says("access", "ok", f"uid {STRANGER} may attach", f"uid {SERVICE}'s")
    root = doctor("--socket-dir", daemon.socket_dir)
    root.says("access", "warn", "root may see its status", f"as uid {SERVICE}")


def test_a_socket_directory_of_somebody_else(open_dir: Path) -> None:
    """A daemon that refuses the directory would be the first to say so."""
    privileged_or_skip("other users")
    os.chown(open_dir, SERVICE, SERVICE)
    report = doctor("--socket-dir", open_dir)
    report.says("socket directory", "warn", f"uid {SERVICE}", "does not start", "--socket-dir")
    stranger = doctor("--socket-dir", open_dir / "new", prefix=as_user(STRANGER))
    stranger.says("socket directory", "warn", f"uid {STRANGER} cannot make it in {open_dir}")


def test_limits(short_dir: Path) -> None:
    """A shell with low limits would make a daemon that ends under load, and nobody know why."""
    limits = ["prlimit", "--nofile=512:512", "--fsize=1000000000", "--memlock=65536:65536", "--"]
    report = doctor("--socket-dir", short_dir, prefix=limits)
    report.says("open files", "warn", "at most 512 fds", "1536", "ulimit -Hn")
    report.says("file size", "warn", "953.7 MiB", "ulimit -f")
    report.says("locked memory", "ok", "64.0 KiB", "not here")


def test_locked_memory_and_a_gpu(tmp_path: Path, short_dir: Path) -> None:
    """Where arenas are to be pinned, a low limit would be passed over, or the GPU not be seen."""
    fake = FakeCuda(tmp_path, devices=2)
    limits = ["prlimit", "--memlock=65536:65536", "--"]
    report = doctor("--socket-dir", short_dir, prefix=limits, env=fake.env())
    report.says("GPU", "ok", "2 by the driver", "GPU-66616b65")
    report.says("locked memory", "warn", "64.0 KiB", "memlock=-1")


def test_a_driver_that_hangs(tmp_path: Path, short_dir: Path) -> None:
    """The command would hang with the driver, and leave a process behind."""
    fake = FakeCuda(tmp_path)
    fake.hang("cuInit")
    report = doctor("--socket-dir", short_dir, env=fake.env())
    fake.heal()
    report.says("GPU", "warn", "has not answered within", "DISCOD_CUDA_LIBRARY")


def test_in_a_container(tmp_path: Path, short_dir: Path, daemon: Daemon) -> None:
    """What a container means for daemon and trainers would not be said, or it would not run there,
    with a daemon outside."""
    privileged_or_skip("a container")
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--mount"]
    hide = ["sh", "-c", 'mount -t tmpfs none /sys && exec "$@"', "sh"]
    report = doctor("--socket-dir", daemon.socket_dir, prefix=[*unshare, *hide])
    report.says("namespaces", "ok", "an own pid and ipc namespace", "cuda-ipc")
    report.says("daemon", "ok", "its pid is not seen", f"uid {os.geteuid()}")
    user = doctor("--socket-dir", short_dir, prefix=["unshare", "--user"])
    user.says("users", "ok", "user namespace of its own")


def test_for_people(short_dir: Path) -> None:
    """The screen would not fit a terminal, or leave out what to do."""
    command = [sys.executable, "-m", "discod", "doctor", "--scratch", "/nowhere", "--socket-dir"]
    ended = subprocess.run(
        [*command, str(short_dir)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert ended.returncode == Exit.CHECKS_FAILED
    lines = ended.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    at = lines.index("scratch /nowhere")
    assert lines[at + 1 : at + 3] == [
        "  fail  directory: it does not exist",
        "        -> create it: mkdir -p /nowhere",
    ]
    assert re.fullmatch(r"\d+ ok, \d+ warnings?, 1 failed", lines[-1])
