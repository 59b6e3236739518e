"""A daemon on the disk that is measured, for as long as a benchmark needs it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.daemon import Daemon


@contextmanager
def service(directory: Path, *args: str) -> Iterator[Daemon]:
    """A daemon with its scratch in ``directory``; ``args`` are more of its options."""
    with (
        tempfile.TemporaryDirectory(prefix="scratch-", dir=directory) as scratch,
        # A socket's path must be short, and needs no disk.
        tempfile.TemporaryDirectory(prefix="discod-bench-") as sockets,
    ):
        daemon = Daemon(
            *args,
            scratch=Path(scratch),
            socket_dir=Path(sockets),
            log_path=Path(sockets) / "daemon.log",
        )
        try:
            daemon.wait_until_ready()
            yield daemon
        finally:
            daemon.close()
