"""The user's and the group's quota on a file system, as the kernel tells everybody their own."""

import ctypes
import os
from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)

_QUOTACTL_FD = 443
"""The system call, Linux 5.14; its number is the same on all machines that torch runs on."""
_Q_GETQUOTA = 0x800007
_KINDS = (0, 1)
"""Of users and of groups (quota.h)."""
_BLOCK_BYTES = 1024


class _Quota(ctypes.Structure):
    """``struct if_dqblk`` (quota.h)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("hard", "soft", "used_bytes")),
        *((name, ctypes.c_uint64) for name in ("files_hard", "files_soft", "files")),
        *((name, ctypes.c_uint64) for name in ("grace", "files_grace")),
        ("valid", ctypes.c_uint32),
    )


def room_by_quota(fd: int) -> Iterator[tuple[str, int]]:
    """Whose quota limits files on the file system of ``fd``, and how many bytes it leaves.

    Nothing where there are no quotas, or none for this user, or the kernel does not say. Quotas of
    directories (project quotas) show in the free space instead.
    """
    for kind, whose, number in zip(
        _KINDS, ("uid", "gid"), (os.geteuid(), os.getegid()), strict=True
    ):
        quota = _Quota()
        command = (_Q_GETQUOTA << 8) | kind
        arguments = (ctypes.c_uint(command), ctypes.c_uint(number), ctypes.byref(quota))
        if _libc.syscall(_QUOTACTL_FD, ctypes.c_uint(fd), *arguments):
            continue
        limits = [limit for limit in (quota.hard, quota.soft) if limit]
        if limits:
            yield f"{whose} {number}", max(0, min(limits) * _BLOCK_BYTES - quota.used_bytes)
