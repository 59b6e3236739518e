"""Where the sockets are."""

from pathlib import Path

import pytest

from discod.wire import paths
from discod.wire.paths import (
    SOCKET_PATH_MAX_BYTES,
    SocketPathTooLong,
    default_socket_dir,
    socket_paths,
)


def test_longest_path() -> None:
    """The kernel would refuse a path that was taken for short enough, or the other way round."""
    room = SOCKET_PATH_MAX_BYTES - len("//attach.sock")
    attach, io = socket_paths(Path("/" + "x" * room))
    assert len(str(attach)) == SOCKET_PATH_MAX_BYTES
    assert io.name == "io.sock"
    with pytest.raises(SocketPathTooLong, match=r"has 108 bytes.*--socket-dir"):
        socket_paths(Path("/" + "x" * (room + 1)))


def test_length_is_in_bytes() -> None:
    """A path with letters of several bytes would be taken for short enough."""
    with pytest.raises(SocketPathTooLong):
        socket_paths(Path("/" + "ä" * 60))


def test_relative_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Daemon and client in different directories would not find each other."""
    monkeypatch.chdir("/tmp")
    assert socket_paths(Path("d"))[0] == Path("/tmp/d/attach.sock")


def test_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users without /run/discod would share a directory, or daemon and client differ on it."""
    monkeypatch.setattr(paths.os, "access", lambda path, mode: True)
    assert default_socket_dir() == Path("/run/discod")
    monkeypatch.setattr(paths.os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket_dir() == Path("/run/user/7/discod")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(paths.tempfile, "gettempdir", lambda: "/var/tmp")
    monkeypatch.setattr(paths.os, "getuid", lambda: 7)
    assert default_socket_dir() == Path("/var/tmp/discod-7")


def test_service_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of the group that a service serves would look for a daemon of their own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    may = {"/run/discod/attach.sock"}
    monkeypatch.setattr(paths.os, "access", lambda path, mode: str(path) in may)
    assert default_socket_dir() == Path("/run/discod")
    may.clear()  # as for those who are not in the group
    assert default_socket_dir() == Path("/run/user/7/discod")
