"""Whose socket a client connects to: the ways in which another user could plant one."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disco_client.errors import SocketForbidden
from disco_client.trust import check_path, check_peer, describe_refusal
from tests.integration.conftest import privileged_or_skip

SERVICE = 12345
ATTACKER = 23456


@pytest.fixture
def system() -> Iterator[Path]:
    """A directory in which only root can make anything, as /run is."""
    privileged_or_skip("files of other users")
    path = Path(tempfile.mkdtemp(prefix="discod-test-", dir="/run"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def make(
    directory: Path, owner: int, mode: int = 0o755, *, socket_owner: int | None = None
) -> Path:
    """A socket directory of ``owner`` with a socket in it."""
    directory.mkdir(parents=True)
    path = directory / "attach.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    os.chown(path, owner if socket_owner is None else socket_owner, -1)
    os.chown(directory, owner, -1)
    directory.chmod(mode)
    return path


def test_a_services_socket(system: Path) -> None:
    """A daemon that runs as a user of its own could not be used by anybody."""
    assert check_path(make(system / "discod", SERVICE)) == SERVICE
    assert check_path(make(system / "deeper" / "discod", SERVICE, 0o710)) == SERVICE


def test_ones_own_and_roots(tmp_path: Path) -> None:
    """A daemon of the same user, or of root, would not be found in /tmp."""
    assert check_path(make(tmp_path / "own", os.geteuid(), 0o700)) == os.geteuid()


def in_tmp(system: Path, tmp_path: Path) -> Path:
    path = Path(tempfile.mkdtemp(prefix="discod-test-"))
    path.rmdir()
    return make(path, ATTACKER)


def directory_others_write(system: Path, tmp_path: Path) -> Path:
    return make(system / "discod", SERVICE, 0o777)


def directory_group_writes(system: Path, tmp_path: Path) -> Path:
    return make(system / "discod", SERVICE, 0o775)


def sticky_above(system: Path, tmp_path: Path) -> Path:
    (system / "shared").mkdir()
    (system / "shared").chmod(0o1777)
    return make(system / "shared" / "discod", ATTACKER)


def attackers_above(system: Path, tmp_path: Path) -> Path:
    path = make(system / "home" / "discod", SERVICE)
    os.chown(system / "home", ATTACKER, -1)
    return path


def anothers_in_the_services(system: Path, tmp_path: Path) -> Path:
    return make(system / "discod", SERVICE, socket_owner=ATTACKER)


def link_in_a_shared_directory(system: Path, tmp_path: Path) -> Path:
    path = make(system / "real", ATTACKER)
    (system / "shared").mkdir()
    (system / "shared").chmod(0o1777)
    (system / "shared" / "discod").symlink_to(path.parent)
    return system / "shared" / "discod" / path.name


def link_to_an_attackers_home(system: Path, tmp_path: Path) -> Path:
    home = system / "home"
    path = make(home / "discod", ATTACKER)
    os.chown(home, ATTACKER, -1)
    (system / "discod").symlink_to("home/discod")
    return system / "discod" / path.name


def link_with_dots(system: Path, tmp_path: Path) -> Path:
    path = link_to_an_attackers_home(system, tmp_path)
    (system / "through").symlink_to("discod/../discod")
    return system / "through" / path.name


def link_in_the_directory(system: Path, tmp_path: Path) -> Path:
    path = make(system / "discod", SERVICE)
    planted = make(system / "other", SERVICE)
    path.unlink()
    path.symlink_to(planted)
    return path


@pytest.mark.parametrize(
    "plant",
    [
        in_tmp,
        directory_others_write,
        directory_group_writes,
        sticky_above,
        attackers_above,
        anothers_in_the_services,
        link_in_a_shared_directory,
        link_to_an_attackers_home,
        link_with_dots,
        link_in_the_directory,
    ],
)
def test_planted(plant: Callable[[Path, Path], Path], system: Path, tmp_path: Path) -> None:
    """A client would hand its arena, and all its activations, to another user."""
    path = plant(system, tmp_path)
    with pytest.raises(SocketForbidden, match="not connecting") as caught:
        check_path(path)
    for part in (str(path), "mode 0", "belongs to uid", "connect(scratch=DIR)"):
        assert part in str(caught.value)
    if plant is in_tmp:
        shutil.rmtree(path.parent)


def test_links_that_root_made(system: Path) -> None:
    """/var/run is one, on every machine."""
    path = make(system / "run" / "discod", SERVICE)
    (system / "var").mkdir()
    (system / "var" / "run").symlink_to("../run")
    (system / "absolute").symlink_to(system / "var" / "run" / "discod")
    assert check_path(system / "var" / "run" / "discod" / path.name) == SERVICE
    assert check_path(system / "absolute" / path.name) == SERVICE


def test_endless_links(system: Path) -> None:
    """The client would follow them for ever."""
    (system / "a").symlink_to("b")
    (system / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        check_path(system / "a" / "attach.sock")


def test_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who got hold of the socket's name in between would be taken for the daemon."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        check_peer(one, Path("/x"), SERVICE)
        monkeypatch.setattr("disco_client.trust._ours", lambda uid: False)
        with pytest.raises(SocketForbidden, match="listens"):
            check_peer(one, Path("/x"), SERVICE)


def test_what_keeps_one_out(system: Path) -> None:
    """The user would be told of a socket, and not of the directory that he may not pass."""
    path = make(system / "discod", SERVICE, 0o700)
    pid = os.fork()
    if not pid:
        os.setuid(ATTACKER)
        said = describe_refusal(path)
        os._exit(0 if f"{path.parent} has mode 0700, owner uid {SERVICE}" in said else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
