"""Starting, refusing to start, ending when idle, and the ``discod status`` command."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from discod import __version__
from discod.config import FIRST_CLIENT_SECONDS
from discod.exits import Exit
from discod.wire.messages import Done
from discod.wire.paths import ATTACH_SOCKET, IO_SOCKET
from discod.wire.sizes import format_size
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import RawClient
from tests.integration.conftest import privileged_or_skip

ROOT = Path(__file__).parents[2]

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]
FAILURE_SECONDS = 3.0


def discod(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "discod", *args],
        capture_output=True,
        text=True,
        timeout=20,
        env=os.environ | env,
        check=False,
    )


def assert_refuses(daemon: Daemon, code: Exit, *said: str) -> None:
    """It ends in time with the code, and its one line says what is wrong and what to do."""
    began = time.monotonic()
    assert daemon.wait() == code, daemon.log
    assert time.monotonic() - began < FAILURE_SECONDS
    (line,) = [line for line in daemon.log.splitlines() if line.startswith("discod: ")]
    for part in said:
        assert part in line


def test_options_of_the_daemon_before_a_command(short_dir: Path) -> None:
    """They would be dropped without a word, and the status be that of another daemon."""
    ended = discod("--socket-dir", str(short_dir), "status")
    assert ended.returncode == Exit.USAGE
    assert "--socket-dir before 'status'" in ended.stderr
    ended = discod("status", "--socket-dir", str(short_dir), DISCOD_SOCKET_DIR="/nowhere")
    assert ended.returncode == Exit.NO_DAEMON
    assert str(short_dir) in ended.stderr


def test_exit_codes_never_change() -> None:
    """Service units and scripts that tell failures apart would be wrong."""
    assert {code.name: code.value for code in Exit} == {
        "OK": 0,
        "CRASHED": 1,
        "USAGE": 2,
        "NO_DAEMON": 3,
        "CHECKS_FAILED": 4,
        "SCRATCH_MISSING": 10,
        "SCRATCH_NOT_A_DIRECTORY": 11,
        "SCRATCH_READ_ONLY": 12,
        "SCRATCH_LOCKED": 13,
        "SCRATCH_UNUSABLE": 14,
        "SOCKET_DIR_UNUSABLE": 20,
        "SOCKET_LOCKED": 21,
        "SOCKET_PATH_TOO_LONG": 22,
        "FAULTS_UNUSABLE": 23,
        "ACTIVATION_UNUSABLE": 24,
        "METRICS_UNUSABLE": 25,
        "FORCED": 30,
    }


class TestScratch:
    def test_missing(self, start_daemon: Start, tmp_path: Path) -> None:
        """A typing error in --scratch would put activations somewhere else."""
        daemon = start_daemon(scratch=tmp_path / "none", ready=False)
        missing = str(tmp_path / "none")
        assert_refuses(daemon, Exit.SCRATCH_MISSING, missing, "errno 2", "create it", "--scratch")

    def test_no_directory(self, start_daemon: Start, tmp_path: Path) -> None:
        """A file instead of a directory would fail at the first attach."""
        path = tmp_path / "file"
        path.touch()
        daemon = start_daemon(scratch=path, ready=False)
        assert_refuses(daemon, Exit.SCRATCH_NOT_A_DIRECTORY, str(path), "errno 20", "directory")

    def test_read_only(self, start_daemon: Start, scratch: Path) -> None:
        """A read-only mount would fail at the first attach."""
        privileged_or_skip("mounting")
        mount = f'mount -t tmpfs -o ro none {scratch} && exec "$@"'
        daemon = start_daemon(prefix=["unshare", "-m", "sh", "-c", mount, "sh"], ready=False)
        assert_refuses(daemon, Exit.SCRATCH_READ_ONLY, str(scratch), "errno 30", "writable")

    def test_takes_no_files(self, start_daemon: Start) -> None:
        """A directory that is there would be said not to be, since /proc answers so."""
        daemon = start_daemon(scratch=Path("/proc"), ready=False)
        assert_refuses(
            daemon, Exit.SCRATCH_UNUSABLE, "/proc", "takes no files", "errno 2", "choose"
        )
        assert "create it" not in daemon.log

    def test_in_use(self, daemon: Daemon, start_daemon: Start, tmp_path: Path) -> None:
        """Two daemons would divide one disk without knowing of each other."""
        second = start_daemon(socket_dir=tmp_path / "other", ready=False)
        assert_refuses(
            second, Exit.SCRATCH_LOCKED, str(daemon.scratch), f"pid {daemon.pid}", "--scratch"
        )

    def test_given_twice(self, start_daemon: Start, scratch: Path) -> None:
        """The same directory twice would be refused with the daemon's own pid as the culprit."""
        daemon = start_daemon(scratch=[scratch, scratch / ".." / "scratch"], ready=False)
        assert daemon.wait() == Exit.USAGE
        said = " ".join(daemon.log.split())
        assert f"--scratch {scratch} is given twice" in said
        assert "name each directory once" in said
        assert "--socket-dir" not in said


class TestSocketDir:
    def test_in_use(self, daemon: Daemon, start_daemon: Start, tmp_path: Path) -> None:
        """A second daemon would take the sockets away from the first one's clients."""
        (tmp_path / "other").mkdir()
        second = start_daemon(scratch=tmp_path / "other", ready=False)
        assert_refuses(
            second, Exit.SOCKET_LOCKED, str(daemon.socket_dir), f"pid {daemon.pid}", "--socket-dir"
        )
        assert daemon.status()["pid"] == daemon.pid

    def test_too_long(self, start_daemon: Start, tmp_path: Path) -> None:
        """The kernel's message would not say what is wrong."""
        daemon = start_daemon(socket_dir=tmp_path / ("x" * 100), ready=False)
        assert_refuses(daemon, Exit.SOCKET_PATH_TOO_LONG, "107", "--socket-dir")

    def test_a_file(self, start_daemon: Start, tmp_path: Path) -> None:
        """A file in the directory's place would be a traceback."""
        path = tmp_path / "file"
        path.touch()
        daemon = start_daemon(socket_dir=path, ready=False)
        assert_refuses(daemon, Exit.SOCKET_DIR_UNUSABLE, str(path), "errno", "--socket-dir")

    @pytest.mark.parametrize("name", [ATTACH_SOCKET, IO_SOCKET])
    def test_something_else_in_a_sockets_place(
        self, start_daemon: Start, socket_dir: Path, name: str
    ) -> None:
        """Somebody's file would be deleted."""
        (socket_dir / name).write_text("precious")
        daemon = start_daemon(ready=False)
        assert_refuses(daemon, Exit.SOCKET_DIR_UNUSABLE, name, "not a socket")
        assert (socket_dir / name).read_text() == "precious"

    def test_of_another_user(self, start_daemon: Start, socket_dir: Path) -> None:
        """In /tmp another user could make the directory first, and then own the sockets."""
        privileged_or_skip("giving a directory away")
        os.chown(socket_dir, 12345, -1)
        daemon = start_daemon(ready=False)
        assert_refuses(daemon, Exit.SOCKET_DIR_UNUSABLE, "another user")

    def test_made_private(self, start_daemon: Start, socket_dir: Path) -> None:
        """Other users could connect, or the daemon need a directory made by hand."""
        daemon = start_daemon(socket_dir=socket_dir / "made")
        assert daemon.socket_dir.stat().st_mode & 0o777 == 0o700
        for name in (ATTACH_SOCKET, IO_SOCKET):
            assert (daemon.socket_dir / name).stat().st_mode & 0o777 == 0o600

    def test_sockets_of_a_killed_daemon(self, daemon: Daemon, start_daemon: Start) -> None:
        """After SIGKILL a daemon could only be started again by hand."""
        daemon.kill()
        assert set(os.listdir(daemon.socket_dir)) == {ATTACH_SOCKET, IO_SOCKET}
        second = start_daemon()
        assert second.status()["pid"] == second.pid

    def test_is_the_scratch(self, start_daemon: Start, scratch: Path) -> None:
        """The daemon would say that it itself holds the lock."""
        daemon = start_daemon(socket_dir=scratch, ready=False)
        assert daemon.wait() == Exit.USAGE
        assert "--scratch and --socket-dir must differ" in " ".join(daemon.log.split())


class TestOptions:
    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ([], "--scratch"),
            (["--scratch", "/", "--ram", "lots"], "'lots' is no size"),
            (["--scratch", "/", "--threads", "1"], "at least 2"),
            (["--scratch", ""], "an empty name is no directory"),
            (["--scratch", "/", "--chunk", "5000"], "multiple of 4096"),
            (["--scratch", "/", "--checksum", "some"], "sampled"),
        ],
    )
    def test_wrong(self, args: list[str], said: str) -> None:
        """A wrong option would be a traceback, or be ignored."""
        result = discod(*args)
        assert result.returncode == Exit.USAGE
        assert said in result.stderr

    def test_from_the_environment(self, start_daemon: Start, tmp_path: Path) -> None:
        """In containers the daemon could not be configured."""
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        daemon = start_daemon(
            scratch=[],
            env={
                "DISCOD_SCRATCH": f"{tmp_path / 'one'}:{tmp_path / 'two'}",
                "DISCOD_RAM": "64MiB",
                "DISCOD_DISK": "3 GiB",
                "DISCOD_THREADS": "3",
                "DISCOD_CHUNK": "1MiB",
                "DISCOD_CHECKSUM": "full",
            },
        )
        status = daemon.status()
        assert [Path(entry["path"]).name for entry in status["scratch"]] == ["one", "two"]
        assert status["ram_bytes"] == 64 << 20
        assert status["disk_bytes"] == 3 << 30
        assert (status["threads"], status["chunk_bytes"]) == (3, 1 << 20)
        assert status["checksum"] == "full"

    def test_version(self) -> None:
        """Bug reports could not name the version."""
        assert __version__ in discod("--version").stdout

    def test_every_option_is_in_the_help(self) -> None:
        """An option would be known to the source alone."""
        text = discod("--help").stdout
        options = set(re.findall(r"--[a-z-]+", text))
        assert options >= {
            "--scratch",
            "--socket-dir",
            "--ram",
            "--disk",
            "--threads",
            "--chunk",
            "--checksum",
            "--log-level",
            "--exit-idle",
            "--version",
        }
        assert f"{FIRST_CLIENT_SECONDS:.0f} s" in text


class TestManners:
    def test_start_is_cheap_and_without_torch(self, daemon: Daemon) -> None:
        """Trainers would wait for their daemon, and its image be gigabytes large.

        By its CPU time, which is the time it takes on a machine that has nothing else to do.
        """
        assert cpu_seconds(daemon) < 0.5
        assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text()

    def test_idle_daemon_uses_no_cpu(self, daemon: Daemon, raw_client: Connect) -> None:
        """It would take time from the trainers, and power, for nothing."""
        client = raw_client(daemon)
        client.arena[:4096] = b"x" * 4096
        client.write(0, 0, 4096)

        def switches() -> int:
            return sum(
                int(line.split()[1])
                for task in Path(f"/proc/{daemon.pid}/task").iterdir()
                for line in (task / "status").read_text().splitlines()
                if line.startswith("voluntary_ctxt_switches")
            )

        def quiet(seconds: float) -> bool:
            before = cpu_seconds(daemon), switches()
            with pytest.raises(subprocess.TimeoutExpired):
                daemon.wait(seconds)
            return (cpu_seconds(daemon), switches()) == before

        eventually(lambda: quiet(0.1), what="the end of what has just happened")
        assert quiet(1.0), "a thread has woken up with nothing to do"
        client.close()

    def test_log_says_what_runs(self, daemon: Daemon) -> None:
        """An operator could not tell from the log how the daemon is set up."""
        assert re.search(rf"discod {re.escape(__version__)} \(pid {daemon.pid}\)", daemon.log)
        assert str(daemon.scratch) in daemon.log
        assert "O_DIRECT" in daemon.log


LOST = """
import sys; from pathlib import Path
from tests.helpers.raw_client import RawClient
client = RawClient(Path(sys.argv[1]))
client.write(0, 0, 4096)
client.dealer.close(linger=0)
assert client.lifeline.recv(1) == b""
client.detach()
print("lost", flush=True)
sys.stdin.read()
"""


class TestExitIdle:
    def test_after_the_last_client(
        self, start_daemon: Start, socket_dir: Path, raw_client: Connect
    ) -> None:
        """A daemon that a trainer has started would stay for ever."""
        daemon = start_daemon("--exit-idle", "0.3")
        one, two = raw_client(daemon), raw_client(daemon)
        one.close()
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(0.7)
        two.close()
        assert daemon.wait(5) == 0
        assert os.listdir(socket_dir) == []
        assert "idle" in daemon.log

    def test_not_before_the_first_client(self, start_daemon: Start, socket_dir: Path) -> None:
        """It would be gone before the slow trainer that has started it attaches."""
        daemon = start_daemon("--exit-idle", "0.1")
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(1)
        assert daemon.status()["clients"] == []

    def test_not_while_a_client_may_come_back(
        self, start_daemon: Start, raw_client: Connect
    ) -> None:
        """What a living trainer has on disk would depend on its being quick to attach again."""
        daemon = start_daemon("--exit-idle", "0.2")
        client = raw_client(daemon)
        client.arena[:4096] = b"x" * 4096
        token = client.write(0, 0, 4096).checksum
        client.dealer.close(linger=0)
        assert client.lifeline.recv(1) == b""
        client.detach()
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(1.5)
        assert daemon.status()["clients"] == []
        client.attach(daemon.socket_dir)
        assert isinstance(client.read(0, 4096, 4096, token), Done)
        assert client.arena[4096:8192] == b"x" * 4096
        client.close()
        assert daemon.wait(5) == 0

    def test_once_it_cannot_come_back(self, start_daemon: Start, tmp_path: Path) -> None:
        """A daemon that a trainer has started would stay for ever after the trainer's death."""
        daemon = start_daemon("--exit-idle", "0.2")
        command = [sys.executable, "-c", LOST, str(daemon.socket_dir)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "lost\n"
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(0.7)
        process.kill()
        process.communicate()
        assert daemon.wait(5) == 0


class TestStatus:
    def test_json(self, daemon: Daemon, raw_client: Connect) -> None:
        """Scripts that read it would find other keys."""
        client = raw_client(daemon, 8 << 20, rank=3)
        client.write(0, 0, 8192)
        client.read(0, 0, 4096)
        result = discod("status", "--json", "--socket-dir", str(daemon.socket_dir))
        assert result.returncode == 0
        status: dict[str, Any] = json.loads(result.stdout)
        assert status["pid"] == daemon.pid
        assert status["version"] == __version__
        (scratch,) = status["scratch"]
        assert scratch["path"] == str(daemon.scratch)
        assert scratch["direct"] is True
        free = shutil.disk_usage(daemon.scratch).free
        assert scratch["free_bytes"] == pytest.approx(free, rel=0.1)
        (entry,) = status["clients"]
        disk_bytes = os.fstat(client.files[0]).st_blocks * 512
        assert entry["disk_bytes"] == scratch["used_bytes"] == pytest.approx(disk_bytes, rel=0.01)
        for name in ("disk_bytes", "attached_seconds", "waits"):
            del entry[name]
        for name in ("written_bytes_per_second", "read_bytes_per_second"):
            assert entry.pop(name) > 0
        assert entry.pop("written_bytes_per_day") > 8192
        assert entry == {
            "pid": os.getpid(),
            "uid": os.getuid(),
            "rank": 3,
            "command": "test",
            "arena_bytes": 8 << 20,
            "written_bytes": 8192,
            "written_last_day_bytes": 8192,
            "writes_held": 0,
            "read_bytes": 4096,
            "writes": 1,
            "reads": 1,
            "write_failures": {},
            "read_failures": {},
            "in_flight": 0,
            "reported_seconds": None,
            "cycles": 0,
            "saved_bytes": 0,
            "elided_bytes": 0,
            "loads": 0,
        }
        client.close()

    def test_table(self, daemon: Daemon, raw_client: Connect) -> None:
        """People would see JSON, or nothing."""
        client = raw_client(daemon, 8 << 20)
        result = discod("status", DISCOD_SOCKET_DIR=str(daemon.socket_dir), COLUMNS="200")
        assert result.returncode == 0
        status = daemon.status()
        assert status["ram_used_bytes"] == 8 << 20
        ram, disk = (format_size(status[name]) for name in ("ram_bytes", "disk_bytes"))
        for part in (
            str(daemon.pid),
            f"arenas: 8.0 MiB taken of {ram} (--ram)",
            f"scratch: 0 B taken of {disk} (--disk)",
            "checksums: sampled: lost, torn and misdirected writes are found",
            "O_DIRECT",
            "in use",
            str(daemon.scratch),
            str(os.getpid()),
        ):
            assert part in result.stdout
        client.close()

    def test_without_a_daemon(self, socket_dir: Path) -> None:
        """The message would not say where it looked, and how to start one."""
        result = discod("status", "--socket-dir", str(socket_dir))
        assert result.returncode == Exit.NO_DAEMON
        assert str(socket_dir / ATTACH_SOCKET) in result.stderr
        assert "discod --scratch" in result.stderr

    def test_of_a_frozen_daemon(self, daemon: Daemon) -> None:
        """The command would hang with the daemon."""
        os.kill(daemon.pid, 19)  # SIGSTOP
        result = discod("status", "--socket-dir", str(daemon.socket_dir))
        os.kill(daemon.pid, 18)  # SIGCONT
        assert result.returncode == Exit.NO_DAEMON
        assert "timed out" in result.stderr


def cpu_seconds(daemon: Daemon) -> float:
    """The CPU time that the daemon has used so far."""
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
