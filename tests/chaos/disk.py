"""Scratch directories that can be full: ext4 of its own on loop devices, else a plain directory.

A mount is made in a mount namespace of this process's own (:func:`enter_namespace`), so nobody
else sees it, and it is gone with the process, whatever becomes of it.
"""

import ctypes
import os
import subprocess
from pathlib import Path

SIZE_BYTES = 640 << 20
"""Of each image, which is sparse: above one step of growth, so that files grow in all ways."""

_CLONE_NEWNS = 0x00020000
_RESERVE_BYTES = 1 << 20


def enter_namespace() -> bool:
    """Give this process mounts of its own; False where it may not have them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        return False
    return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0


class Disk:
    """One scratch directory.

    Args:
        folder: Where to make it.
        mount: Whether it is to be a file system of its own.

    Attributes:
        mounted: Whether it is.
    """

    def __init__(self, folder: Path, *, mount: bool) -> None:
        folder.mkdir()
        self.path = folder / "scratch"
        self.path.mkdir()
        self._filler = self.path / "filler"
        self.mounted = mount and self._mount(folder / "image")

    def fill(self, left_bytes: int) -> bool:
        """Leave ``left_bytes`` free, or what little there is; False where it cannot be filled."""
        if not self.mounted:
            return False
        free_bytes = self.free_bytes() - left_bytes - _RESERVE_BYTES
        if free_bytes > 0:
            fd = os.open(self._filler, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(fd, 0, free_bytes)
            except OSError:
                pass  # others allocate at the same time: it is full
            finally:
                os.close(fd)
        return True

    def free(self) -> None:
        """Take away what filled it."""
        self._filler.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """What it has free for all users."""
        status = os.statvfs(self.path)
        return status.f_bfree * status.f_frsize

    def entries(self) -> list[str]:
        """What has a name in it and should not."""
        return [name for name in os.listdir(self.path) if name not in ("lost+found", "filler")]

    def close(self) -> None:
        """Unmount."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)
            self.mounted = False

    def _mount(self, image: Path) -> bool:
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        commands = (
            ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(self.path)],
        )
        try:
            for command in commands:
                subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return False
        return True
