"""Runs an image as a container engine would: its entrypoint as process 1 of its own namespaces.

Of its own: processes, mounts, System V IPC, host name, and the network, which is none. The root is
read-only, ``/dev/shm`` holds 64 KiB, there are no capabilities, and only volumes are shared.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.daemon import eventually
from tests.images.build import Image

_DEVICES = ("null", "zero", "full", "random", "urandom")
_UNSHARE = ("unshare", "--pid", "--fork", "--mount", "--ipc", "--uts", "--net")


class Container:
    """One running container.

    Args:
        image: What it is made of.
        volumes: Directories of the machine, by the place in the container; ``:ro`` may follow.
        arguments: After the entrypoint.
        environment: Beside the image's.
        groups: Supplementary gids, as ``group_add`` gives them.
        log: Where its output goes.
    """

    def __init__(
        self,
        image: Image,
        volumes: Mapping[str, Path],
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        groups: Sequence[int] = (),
        log: Path = Path(os.devnull),
    ) -> None:
        self._image = image
        self._environment = image.environment | dict(environment or {})
        self._groups = groups
        command = [*self._become(), *image.entrypoint, *arguments]
        script = [
            *_setup(image.root, volumes),
            shlex.join(["exec", "chroot", str(image.root), *command]),
        ]
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*_UNSHARE, "sh", "-euc", "\n".join(script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        """Of its process 1, as the machine knows it."""
        outer = self.process.pid
        children = Path(f"/proc/{outer}/task/{outer}/children")
        return int(eventually(children.read_text).split()[0])

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as ``docker exec`` and health checks do."""
        inside = ["nsenter", f"--target={self.pid}", "--all", "--root", "--wdns=/"]
        return subprocess.run(
            [*inside, *self._become(), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def healthy(self) -> bool:
        """Whether the image's health check succeeds."""
        return self.execute(*self._image.healthcheck).returncode == 0

    def stop(self, timeout: float = 10) -> int:
        """Send the image's signal to process 1; the exit code."""
        os.kill(self.pid, signal.Signals[self._image.stop_signal])
        return self.process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL to process 1, and the kernel's to all others with it."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()

    def zombies(self) -> int:
        """Dead processes that nobody has reaped inside."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" for pid in children)

    def _become(self) -> list[str]:
        """What comes before a command inside: the user, without capabilities, and environment."""
        user, _, group = self._image.user.partition(":")
        groups = (
            f"--groups={','.join(map(str, self._groups))}" if self._groups else "--clear-groups"
        )
        return [
            *("/usr/bin/setpriv", f"--reuid={user}", f"--regid={group or user}", groups),
            *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
            *("/usr/bin/env", "-i", f"--chdir={self._image.directory}"),
            *(f"{name}={value}" for name, value in self._environment.items()),
        ]


def _setup(root: Path, volumes: Mapping[str, Path]) -> list[str]:
    """Commands of a shell that is alone in its namespaces."""
    place = shlex.quote(str(root))
    lines = [
        # As engines do, which make what a volume is mounted on.
        *(f"mkdir -p {place}{inside.partition(':')[0]}" for inside in volumes),
        f"mount --bind {place} {place}",
        f"mount -o remount,bind,ro {place}",
        f"mount -t proc proc {place}/proc",
        f"mount -t tmpfs -o mode=755 tmpfs {place}/dev",
        f"mkdir {place}/dev/shm",
        f"mount -t tmpfs -o size=64k tmpfs {place}/dev/shm",
        f"mount -t tmpfs tmpfs {place}/tmp",
    ]
    for device in _DEVICES:
        lines += [f"touch {place}/dev/{device}", f"mount --bind /dev/{device} {place}/dev/{device}"]
    for where, source in volumes.items():
        inside, _, mode = where.partition(":")
        target = f"{place}{inside}"
        lines.append(f"mount --bind {shlex.quote(str(source))} {target}")
        if mode == "ro":
            lines.append(f"mount -o remount,bind,ro {target}")
    return lines
