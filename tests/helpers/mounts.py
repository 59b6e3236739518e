"""Small file systems for one daemon alone, mounted in a mount namespace of its own. Needs root."""

import errno
import os
import subprocess
from pathlib import Path

from discod.wire import PAGE_BYTES
from tests.helpers.daemon import Daemon


def ext4(image: Path, directory: Path, size_mib: int, options: str = "") -> list[str]:
    """The prefix of a daemon that sees a new ext4 of so many MiB in ``directory``."""
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    return mounted(f"mount -o loop{options} {image} {directory}")


def mounted(command: str) -> list[str]:
    """The prefix of a daemon in whose namespace ``command`` was run."""
    return ["unshare", "-m", "sh", "-c", f'{command} && exec "$@"', "sh"]


def as_seen_by(daemon: Daemon, directory: Path) -> Path:
    """The directory that is there for ``daemon``, by a path that works here."""
    return Path(f"/proc/{daemon.pid}/root{directory}")


def free_bytes(directory: Path) -> int:
    """What the file system has free."""
    status = os.statvfs(directory)
    return status.f_bfree * status.f_frsize


def fill(directory: Path, leave_bytes: int = 0) -> Path:
    """Fill the disk with one file, but for so many bytes."""
    filler = directory / "filler"
    wanted = size = free_bytes(directory) - leave_bytes
    with filler.open("wb") as file:
        filled = 0
        while filled < wanted and size >= PAGE_BYTES:
            try:
                os.posix_fallocate(file.fileno(), filled, size)
                filled += size
            except OSError as error:  # what the file system needs for itself is not known before
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
            size = min(size, wanted - filled)
    return filler
