"""A scratch directory: can it be used, is it a disk, and is there room."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from discod.block_device import block_device
from discod.checkup.errand import Answer
from discod.checkup.finding import Finding, fail, ok, warn
from discod.checkup.quotas import room_by_quota
from discod.io import Io
from discod.locks import holder_of
from discod.probe import IN_RAM, NoTmpfile, fs_type_of, open_nameless, open_tmpfile, write_and_read
from discod.syscalls import fallocate
from discod.wire.sizes import format_size

LITTLE_BYTES = 10 << 30
"""Less than a step of training with offloading takes, as a rule: a small model's at long
context."""

NEEDED_BYTES = 256 << 20
"""A scratch file's first step: with less every write is refused."""

_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "virtiofs"})
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_DISK = "choose a directory on a local NVMe disk"


def check_scratch(path: Path) -> Answer:
    """The findings about one directory, and the pid of the daemon that has locked it, or 0."""
    findings = list(_findings(path))
    holder = None
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            holder = holder_of(fd)
        finally:
            os.close(fd)
    return findings, holder or 0


def check_lock(path: Path, holder: int, daemon_pid: int) -> Iterator[Finding]:
    """What follows from ``holder``, as :func:`check_scratch` gives it, having the directory.

    ``daemon_pid``: Of the daemon that answers, or 0.
    """
    if holder == 0:
        return
    if holder == daemon_pid:
        yield ok("in use", f"by the daemon that runs, pid {holder}", str(path))
    else:
        remedy = "use that daemon (its --socket-dir), stop it, or give this one another directory"
        yield warn("in use", f"by another daemon, pid {holder}", remedy, str(path))


def _findings(path: Path) -> Iterator[Finding]:
    """After one that ends it all there are no more."""
    subject = str(path)
    unusable = _reachable(path, subject)
    if unusable is not None:
        yield unusable
        return
    fs_type = fs_type_of(path)
    try:
        fd, nameless = _open(path, subject)
    except OSError as error:
        yield _not_writable(path, error, fs_type)
        return
    try:
        device = os.fstat(fd).st_dev
        yield ok("writable", f"uid {os.geteuid()} can make files in it", subject)
        yield nameless
        yield _file_system(fs_type, subject)
        yield _device(device, fs_type, subject)
        yield _direct(path, fs_type, subject)
        yield _space(fd, subject)
        yield from _quota(fd, subject)
        yield from _reservation(fd, fs_type, subject)
    finally:
        os.close(fd)


def _reachable(path: Path, subject: str) -> Finding | None:
    try:
        os.stat(path)
    except FileNotFoundError:
        return fail("directory", "it does not exist", f"create it: mkdir -p {path}", subject)
    except OSError as error:
        remedy = f"let uid {os.geteuid()} into it, or choose another directory"
        return fail("directory", f"it cannot be reached: {error.strerror}", remedy, subject)
    if not path.is_dir():
        return fail("directory", "it is no directory", "give a directory", subject)
    return None


def _open(path: Path, subject: str) -> tuple[int, Finding]:
    """A nameless file, and what to say of it."""
    try:
        fd = open_tmpfile(path, Io(), direct=False)
    except NoTmpfile:
        # As the daemon does it: there is no other way to learn more here.
        fd = open_nameless(path, Io(), direct=False)
        return fd, warn(
            "O_TMPFILE",
            "its file system has none: scratch files have a name for a moment",
            "nothing need be done; the daemon removes what a kill in that moment leaves",
            subject,
        )
    return fd, ok("O_TMPFILE", "scratch files never have a name", subject)


def _not_writable(path: Path, error: OSError, fs_type: str) -> Finding:
    uid = os.geteuid()
    match error.errno:
        case errno.EROFS:
            found, remedy = f"{fs_type} is mounted read-only", "mount it read-write (mount -o rw)"
        case errno.EACCES | errno.EPERM:
            status = path.stat()
            found = (
                f"uid {uid} may not write to it: it belongs to uid {status.st_uid}, gid "
                f"{status.st_gid}, mode {status.st_mode & 0o7777:04o}"
            )
            remedy = f"give it to uid {uid} (chown), or run this as the user who runs the daemon"
        case errno.ENOSPC | errno.EDQUOT:
            found, remedy = f"no file can be made: {error.strerror}", "free some space, or inodes"
        case _:
            found = f"no file can be made on {fs_type}: {error.strerror} (errno {error.errno})"
            remedy = _DISK
    return fail("writable", found, remedy, str(path))


def _file_system(fs_type: str, subject: str) -> Finding:
    check = "file system"
    if fs_type in IN_RAM:
        found = f"{fs_type}, which is memory: what is offloaded to it frees none"
        return fail(check, found, _DISK, subject)
    if fs_type in _REMOTE or fs_type.startswith("fuse"):
        found = f"{fs_type}: a server or a process is behind it, which may be slow or go away"
        return warn(check, found, _DISK, subject)
    if fs_type == "overlay":
        found = "overlay: a container's own layer, on the disk of its images"
        return warn(check, found, "mount a directory of an NVMe disk into the container", subject)
    return ok(check, fs_type, subject)


def _device(device: int, fs_type: str, subject: str) -> Finding:
    check = "device"
    found = block_device(device)
    if found is None:
        return ok(check, f"not known: {fs_type} is on no single disk that /sys shows", subject)
    if found.rotational:
        # Disks of virtual machines say so too, whatever is below them.
        remedy = f"{_DISK}; in a virtual machine it may be untrue: measure it, say with fio"
        return warn(check, f"{found.name} says that it rotates", remedy, subject)
    kind = "NVMe" if found.name.startswith("nvme") else "not NVMe by its name"
    return ok(check, f"{found.name}, {kind}, does not rotate", subject)


def _direct(path: Path, fs_type: str, subject: str) -> Finding:
    check = "O_DIRECT"
    try:
        fd = open_nameless(path, Io(), direct=True)
        try:
            write_and_read(fd, Io())
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _NO_SPACE:
            remedy = "free some space, and try again"
            return warn(check, f"not tried: {error.strerror}", remedy, subject)
        found = f"does not work on {fs_type} ({error.strerror}): I/O goes through the page cache"
        return warn(check, found, "choose ext4 or xfs on a local NVMe disk", subject)
    return ok(check, "a page was written and read", subject)


def _space(fd: int, subject: str) -> Finding:
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    total = status.f_blocks * status.f_frsize
    found = f"{format_size(free)} of {format_size(total)} are free"
    if free < NEEDED_BYTES:
        return fail("space", found, "free some space, or choose another directory", subject)
    if free < LITTLE_BYTES:
        remedy = "see what your steps write: discod status; or choose a larger disk"
        return warn("space", f"only {found}", remedy, subject)
    return ok("space", found, subject)


def _quota(fd: int, subject: str) -> Iterator[Finding]:
    for whose, free in room_by_quota(fd):
        found = f"the file system's quota leaves {whose} {format_size(free)}"
        if free < LITTLE_BYTES:
            yield warn("quota", found, "have the quota raised, or choose another disk", subject)
        else:
            yield ok("quota", found, subject)


def _reservation(fd: int, fs_type: str, subject: str) -> Iterator[Finding]:
    """Only where something is wrong: files grow by reserving space."""
    try:
        fallocate(fd, 0, 1 << 20)
    except OSError as error:
        if error.errno in _NO_SPACE:
            remedy = "free some space, have the quota raised, or choose another directory"
            yield fail("reservation", f"1 MiB cannot be had: {error.strerror}", remedy, subject)
        else:
            found = f"{fs_type} cannot reserve space ({error.strerror})"
            remedy = "a full disk shows only when it is written to; choose ext4 or xfs"
            yield warn("reservation", found, remedy, subject)
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
