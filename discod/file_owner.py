"""Whose client a nameless scratch file was made for: noted on the file, for the next daemon.

All scratch files belong to the daemon's user. Those of other users' clients carry the uid in an
extended attribute, which only the daemon's user can change (a client has an ``O_PATH`` fd). Where
the file system has no such attributes (ramfs, tmpfs before Linux 6.6), their files cannot be
resumed: the next daemon could not tell one user's from another's. Files of the daemon's own user
carry nothing.
"""

import contextlib
import errno
import os

_ATTRIBUTE = "user.discod.uid"

_NO_ATTRIBUTES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES)
_NO_SUCH = (errno.ENODATA, *_NO_ATTRIBUTES)


class NotTheOwner(Exception):
    """The file is not that user's, or it cannot be told; the text says which."""


def mark_owner(fd: int, user: int) -> None:
    """Note that the file is for a client of the user. Raises ``OSError`` but where it is no use."""
    try:
        os.setxattr(fd, _ATTRIBUTE, str(user).encode())
    except OSError as error:
        if error.errno not in (*_NO_ATTRIBUTES, errno.ENOSPC, errno.EDQUOT):
            raise


def check_owner(fd: int, user: int | None) -> None:
    """Raise :class:`NotTheOwner` unless the file was made for this user; None: for our own."""
    owner = _owner(fd)
    if user is None and owner is not None:
        raise NotTheOwner(f"it is a client's of uid {owner}")
    if user is not None and owner is None:
        raise NotTheOwner(
            f"it does not say that it is a client's of uid {user}: its file system has no extended "
            "attributes, or it is another user's"
        )
    if owner != user:
        raise NotTheOwner(f"it is a client's of uid {owner}, not of uid {user}")


def _owner(fd: int) -> int | None:
    try:
        value = os.getxattr(fd, _ATTRIBUTE)
    except OSError as error:
        if error.errno in _NO_SUCH:
            return None
        raise
    with contextlib.suppress(ValueError):
        return int(value)
    return -1
