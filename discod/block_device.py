"""The block device that a file's ``st_dev`` is on, as far as /sys tells.

File systems over several disks (btrfs, overlayfs) and over none (tmpfs, NFS) have an ``st_dev`` of
their own that is no block device; a container may have no /sys.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A disk or a part of one.

    Attributes:
        name: As under /dev: ``nvme0n1p1``.
        rotational: Whether it, or a disk below it, says that it rotates; None: it does not say.
    """

    name: str
    rotational: bool | None


def block_device(device: int, sys: Path = Path("/sys")) -> BlockDevice | None:
    """The block device with this number; None: there is none, or /sys does not tell.

    Args:
        device: ``st_dev``.
        sys: Where /sys is; tests give their own.
    """
    link = sys / f"dev/block/{os.major(device)}:{os.minor(device)}"
    try:
        real = link.resolve(strict=True)
    except OSError:
        return None
    return BlockDevice(real.name, _rotational(real))


def _rotational(real: Path) -> bool | None:
    """What the queue of the disk says, or of the disk that a partition is of."""
    for place in (real, real.parent):
        try:
            return (place / "queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None


def device_name(device: int, root: Path = Path("/sys")) -> str:
    """``nvme0n1p1`` for an ``st_dev``; empty where it is none: tmpfs, overlay, btrfs, network.

    Args:
        device: ``st_dev`` of a file.
        root: Where sysfs is; tests give their own.
    """
    link = root / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""
