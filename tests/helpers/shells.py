"""Lines of the documents, run by a shell as a user would."""

import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from discod.exits import Exit
from tests.helpers.daemon import eventually


def shell(
    variables: Mapping[str, str], line: str, where: Path, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run a line to its end.

    Args:
        variables: The environment.
        line: For bash.
        where: The working directory; the daemon's sockets are in ``s`` there.
        timeout: In seconds.
    """
    return subprocess.run(
        ["bash", "-c", line],
        cwd=where,
        env={**variables, "DISCOD_SOCKET_DIR": str(where / "s")},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Service:
    """``discod`` in "another terminal", for a block; it must end well.

    Args:
        variables, where: As for :func:`shell`.
        line: What starts it.
    """

    def __init__(self, variables: Mapping[str, str], line: str, where: Path) -> None:
        self._answers = lambda: shell(variables, "discod status --json", where).returncode == 0
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=where,
            env={**variables, "DISCOD_SOCKET_DIR": str(where / "s")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> None:
        try:
            eventually(self._answers, 20, "the daemon's start")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(20) == Exit.OK
