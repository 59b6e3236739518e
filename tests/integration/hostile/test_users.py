"""Who is let in: users, groups, modes, and that nothing of it hangs on the umask."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from discod.exits import Exit
from discod.wire.fds import receive_packet
from tests.helpers.daemon import Daemon
from tests.helpers.raw_client import MIB, RawClient, attach, make_arena
from tests.helpers.users import as_user, python_as
from tests.integration.conftest import privileged_or_skip

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]

ROOT = Path(__file__).parents[3]
SERVICE = 12345
TRAINER = 23456
GROUP, SECOND = 34567, 34568

PING = """
import sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from discod.wire.messages import Done, Ping
from tests.helpers.raw_client import RawClient
client = RawClient(Path(sys.argv[1]))
assert isinstance(client.write(0, 0, 4096), Done)
print(type(client.ask(Ping)).__name__)
"""
CONNECT = """
import sys, time; sys.path[:0] = sys.argv[2:]
import types
package = types.ModuleType("disco_client")  # without what its __init__ imports: torch takes seconds
package.__path__ = [sys.argv[-1] + "/disco_client"]
sys.modules["disco_client"] = package
from pathlib import Path
from disco_client.errors import AttachRefused
from disco_client.greeting import Greeting
from tests.helpers.raw_client import make_arena
began = time.monotonic()
try:
    Greeting(Path(sys.argv[1])).attach(make_arena(4096), 4096, [])
    print("attached")
except (PermissionError, AttachRefused) as error:
    print(type(error).__name__, error)
assert time.monotonic() - began < 3, "it took its time"
"""
PATHS = (ROOT, ROOT / "client")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A directory that only root can write to and all can pass, as /run is."""
    privileged_or_skip("other users")
    path = Path(tempfile.mkdtemp(prefix="discod-test-", dir="/run"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def service(start_daemon: Start, run_dir: Path, *args: str, gid: int = SERVICE) -> Daemon:
    """A daemon that runs as a user of its own, in the directories that a service manager makes."""
    for name in ("sockets", "scratch"):
        (run_dir / name).mkdir()
        os.chown(run_dir / name, SERVICE, gid)
    (run_dir / "sockets").chmod(0o755)
    return start_daemon(
        *args,
        scratch=run_dir / "scratch",
        socket_dir=run_dir / "sockets",
        prefix=as_user(SERVICE, gid, [GROUP, SECOND]),
    )


@pytest.mark.parametrize("umask", [0o000, 0o777])
@pytest.mark.parametrize(
    ("groups", "directory", "sockets"),
    [((), 0o700, 0o600), ((GROUP,), 0o710, 0o660), ((GROUP, SECOND), 0o711, 0o666)],
)
def test_modes(
    start_daemon: Start,
    raw_client: Connect,
    socket_dir: Path,
    umask: int,
    groups: tuple[int, ...],
    directory: int,
    sockets: int,
) -> None:
    """Under the umask of some shell, others could use the daemon or nobody could."""
    privileged_or_skip("giving sockets to a group")
    made = socket_dir / "made"
    options = [option for gid in groups for option in ("--allow-group", str(gid))]
    prefix = ["sh", "-c", f'umask {umask:04o}; exec "$@"', "sh"]
    daemon = start_daemon(*options, socket_dir=made, prefix=prefix)
    assert mode_of(made) == directory
    for name in ("attach.sock", "io.sock"):
        assert mode_of(made / name) == sockets
        assert (made / name).stat().st_gid == (groups[0] if len(groups) == 1 else os.getegid())
    client = raw_client(daemon)
    status = os.fstat(client.files[0])
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.geteuid())
    abstract = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    assert not [name for name in abstract if name.startswith("@") and "discod" in name]
    daemon.kill()
    again = start_daemon(*options, socket_dir=made, prefix=prefix)
    client.detach()
    client.attach(again.socket_dir)


def test_a_directory_that_is_there_keeps_its_mode(start_daemon: Start, socket_dir: Path) -> None:
    """A service manager's RuntimeDirectoryMode= would be overridden."""
    privileged_or_skip("giving sockets to a group")
    socket_dir.chmod(0o755)
    start_daemon("--allow-group", str(GROUP))
    assert mode_of(socket_dir) == 0o755
    assert socket_dir.stat().st_gid == os.getegid()


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o757, True), (0o1777, False)])
def test_directory_that_others_write_to(
    start_daemon: Start, socket_dir: Path, mode: int, refused: bool
) -> None:
    """Others could put their socket in place of the daemon's."""
    socket_dir.chmod(mode)
    daemon = start_daemon(ready=not refused)
    if refused:
        assert daemon.wait() == Exit.SOCKET_DIR_UNUSABLE
        assert f"mode {mode:04o}" in daemon.log


@pytest.mark.parametrize("way", ["option", "environment"])
def test_unknown_group(tmp_path: Path, way: str) -> None:
    """A slip of the pen would start a daemon that serves nobody."""
    options = ["--allow-group", "no-such-group"] if way == "option" else []
    named = {"DISCOD_ALLOW_GROUP": "root, no-such-group"} if way == "environment" else {}
    result = subprocess.run(
        [sys.executable, "-m", "discod", "--scratch", str(tmp_path), *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | named,
    )
    assert result.returncode == 2
    assert "no group 'no-such-group'" in result.stderr


def test_a_service_and_its_group(start_daemon: Start, run_dir: Path) -> None:
    """Trainers of other users could not use a node's daemon, or everybody could (DC-115)."""
    daemon = service(start_daemon, run_dir, "--allow-group", str(GROUP))
    first = as_user(TRAINER, TRAINER, [GROUP])
    assert python_as(first, PING, daemon.socket_dir, *PATHS) == "Done\n"
    assert python_as(as_user(TRAINER, GROUP), PING, daemon.socket_dir, *PATHS) == "Done\n"
    assert python_as(first, CONNECT, daemon.socket_dir, *PATHS) == "attached\n"
    said = python_as(as_user(TRAINER), CONNECT, daemon.socket_dir, *PATHS)
    assert said.startswith("SocketForbidden")
    for part in (daemon.socket_dir / "attach.sock", "mode 0660", f"gid {GROUP}", "--allow-group"):
        assert str(part) in said
    # Root may look, and is no client: its arena would be the service's to read.
    assert daemon.status()["clients"] == []
    arena = make_arena(MIB)
    lifeline, _, reply, _ = attach(daemon.socket_dir, MIB, [arena])
    assert f"gid {GROUP}, not uid 0 " in reply.text
    lifeline.close()
    os.close(arena)


def test_several_groups(start_daemon: Start, run_dir: Path) -> None:
    """A socket has one group: members of the others would be kept out, or strangers let in."""
    daemon = service(
        start_daemon, run_dir, "--allow-group", str(GROUP), "--allow-group", str(SECOND)
    )
    for groups in ([GROUP], [1, 2, 3, SECOND]):
        prefix = as_user(TRAINER, TRAINER, groups)
        assert python_as(prefix, PING, daemon.socket_dir, *PATHS) == "Done\n"
    said = python_as(as_user(TRAINER), CONNECT, daemon.socket_dir, *PATHS)
    assert said.startswith("AttachRefused")
    for part in (f"uid {SERVICE}", f"gid {GROUP}", f"gid {SECOND}", f"not uid {TRAINER}"):
        assert part in said


def test_nobodys_service(start_daemon: Start, run_dir: Path) -> None:
    """Without a group the daemon would serve others than its own user."""
    daemon = service(start_daemon, run_dir)
    said = python_as(as_user(TRAINER), CONNECT, daemon.socket_dir, *PATHS)
    assert said.startswith("SocketForbidden")
    assert "mode 0600" in said
    assert python_as(as_user(SERVICE), PING, daemon.socket_dir, *PATHS) == "Done\n"


def test_group_that_the_daemon_is_not_in(start_daemon: Start, run_dir: Path) -> None:
    """It would start with sockets that the group cannot use."""
    (run_dir / "sockets").mkdir()
    (run_dir / "scratch").mkdir()
    for name in ("sockets", "scratch"):
        os.chown(run_dir / name, SERVICE, SERVICE)
    daemon = start_daemon(
        "--allow-group",
        "54321",
        scratch=run_dir / "scratch",
        socket_dir=run_dir / "sockets",
        prefix=as_user(SERVICE),
        ready=False,
    )
    assert daemon.wait() == Exit.SOCKET_DIR_UNUSABLE
    assert "gid 54321" in daemon.log
    assert not list((run_dir / "sockets").iterdir())


RESUME = """
import os, socket, sys; sys.path[:0] = sys.argv[3:]
from pathlib import Path
from discod.wire.messages import Attached
from tests.helpers.raw_client import MIB, attach, make_arena
fd = int(sys.argv[2])
_, _, reply, _ = attach(Path(sys.argv[1]), MIB, [make_arena(MIB), fd], resume=True)
print(getattr(reply, "text", "let in"))
"""
KEEP = """
import os, socket, sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from discod.wire.fds import send_packet
from tests.helpers.raw_client import MIB, RawClient
client = RawClient(Path(sys.argv[1]))
client.write(0, 0, MIB)
with socket.socket(fileno=0) as other:
    send_packet(other, b"file", client.files)
    other.recv(1)
"""


def test_files_of_another_user(start_daemon: Start, run_dir: Path) -> None:
    """One user could resume with another's scratch file, and read it through the daemon."""

    daemon = service(start_daemon, run_dir, "--allow-group", str(GROUP))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one = as_user(TRAINER, TRAINER, [GROUP])
    victim = subprocess.Popen(
        [*one, sys.executable, "-c", KEEP, str(daemon.socket_dir), *map(str, PATHS)], stdin=there
    )
    there.close()
    here.settimeout(20)
    _, (fd,) = receive_packet(here)
    os.set_inheritable(fd, True)
    daemon.kill()
    victim.kill()
    victim.wait()
    here.close()
    again = start_daemon(
        "--allow-group",
        str(GROUP),
        scratch=run_dir / "scratch",
        socket_dir=daemon.socket_dir,
        prefix=as_user(SERVICE, SERVICE, [GROUP, SECOND]),
    )

    def resume(prefix: list[str]) -> str:
        command = [*prefix, sys.executable, "-c", RESUME, str(again.socket_dir), str(fd)]
        return subprocess.run(
            [*command, *map(str, PATHS)],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            close_fds=False,
        ).stdout

    other = as_user(TRAINER + 1, TRAINER + 1, [GROUP])
    assert f"a client's of uid {TRAINER}, not of uid {TRAINER + 1}" in resume(other)
    assert f"a client's of uid {TRAINER}" in resume(as_user(SERVICE))
    assert resume(one) == "let in\n"
    os.close(fd)
