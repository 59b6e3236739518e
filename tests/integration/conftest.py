"""Real daemons for integration tests, cleaned up whatever the test does."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.helpers.daemon import Daemon
from tests.helpers.raw_client import RawClient


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for sockets, with a path that is short enough."""
    path = Path(tempfile.mkdtemp(prefix="discod-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """An empty directory on a real file system."""
    path = tmp_path / "scratch"
    path.mkdir()
    return path


@pytest.fixture
def start_daemon(
    tmp_path: Path, scratch: Path, socket_dir: Path
) -> Iterator[Callable[..., Daemon]]:
    """``start_daemon(*args, scratch=..., socket_dir=...)``: a daemon that is ready.

    ``ready=False`` returns it at once; ``prefix``, ``env`` and ``pass_fds`` are as in
    :class:`Daemon`.
    """
    daemons: list[Daemon] = []

    def start(
        *args: str,
        scratch: Path | Sequence[Path] = scratch,
        socket_dir: Path = socket_dir,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        ready: bool = True,
    ) -> Daemon:
        daemon = Daemon(
            *args,
            scratch=scratch,
            socket_dir=socket_dir,
            log_path=tmp_path / f"daemon-{len(daemons)}.log",
            prefix=prefix,
            env=env,
            pass_fds=pass_fds,
        )
        daemons.append(daemon)
        if ready:
            daemon.wait_until_ready()
        return daemon

    yield start
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    """One daemon with the default options."""
    return start_daemon()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests of a module that must do it no harm: it is not started each time."""
    path = tmp_path_factory.mktemp("shared")
    scratch = path / "scratch"
    scratch.mkdir()
    socket_dir = Path(tempfile.mkdtemp(prefix="discod-test-"))
    daemon = Daemon(scratch=scratch, socket_dir=socket_dir, log_path=path / "daemon.log")
    try:
        daemon.wait_until_ready()
        yield daemon
    finally:
        daemon.close()
        shutil.rmtree(socket_dir)


@pytest.fixture
def raw_client() -> Iterator[Callable[..., RawClient]]:
    """``raw_client(daemon, ...)``: an attached :class:`RawClient`, closed after the test."""
    clients: list[RawClient] = []

    def attach(daemon: Daemon, *args: int, **kwargs: Any) -> RawClient:
        clients.append(RawClient(daemon.socket_dir, *args, **kwargs))
        return clients[-1]

    yield attach
    for client in clients:
        client.close()


CLEAR_ERROR_SECONDS = 5.0
"""From the call that meets a fault to its error, unless a timeout that was set says otherwise."""


class ClearError(Protocol):
    """The fixture :func:`clear_error`."""

    def __call__(
        self, kind: type[BaseException], fault: str
    ) -> AbstractContextManager[pytest.ExceptionInfo[BaseException]]: ...


@pytest.fixture
def clear_error(record_property: Callable[[str, object], None]) -> ClearError:
    """``with clear_error(kind, fault) as caught``: raises ``kind`` in time, which is recorded.

    ``pytest --junitxml`` has the seconds of each fault.
    """

    @contextmanager
    def raises(
        kind: type[BaseException], fault: str
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        began = time.monotonic()
        with pytest.raises(kind) as caught:
            yield caught
        seconds = time.monotonic() - began
        record_property(f"seconds until the error: {fault}", f"{seconds:.2f}")
        assert seconds < CLEAR_ERROR_SECONDS

    return raises


def privileged_or_skip(what: str) -> None:
    """Skip where a test needs root; with DISCOD_TEST_REQUIRE_ALL=1 fail instead."""
    if os.geteuid() == 0:
        return
    if os.environ.get("DISCOD_TEST_REQUIRE_ALL") == "1":
        pytest.fail(f"DISCOD_TEST_REQUIRE_ALL is set, and {what} needs root")
    pytest.skip(f"{what} needs root")
