"""The name of the block device that a file system is on."""

import os
from pathlib import Path


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
