"""A scratch directory: locked and probed at start, then a source of nameless files.

A file's growth and its share of the quota are in :mod:`discod.scratch_file`.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from discod.block_device import device_name
from discod.budget import Budget
from discod.exits import Exit, StartupError
from discod.file_owner import NotTheOwner, check_owner, mark_owner
from discod.health import DEVICE_ERRORS, Health
from discod.io import Io
from discod.locks import Locked, lock_directory
from discod.probe import (
    FILE_MODE,
    FILE_PREFIX,
    IN_RAM,
    fs_type_of,
    open_nameless,
    write_and_read,
)
from discod.scratch_file import ScratchFile
from discod.syscalls import stat_known
from discod.wire import PAGE_BYTES

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}

_log = logging.getLogger(__name__)


class ForeignFile(Exception):
    """A file handed over to be resumed is none that a daemon of this user made here."""


class Directory:
    """One scratch directory, locked for this process's life.

    Args:
        path: The directory.
        io: The system calls.

    Attributes:
        direct: Whether its files are O_DIRECT.
        device: ``st_dev`` of its files, which a union file system may set apart from its own.
        device_name: The block device's, as ``nvme0n1p1``; empty where there is none.
        health: Whether it is in use.

    Raises:
        StartupError: It cannot be used.
    """

    def __init__(self, path: Path, io: Io | None = None) -> None:
        self.path = path
        self.health = Health()
        self._io = io or Io()
        self._lock_fd = self._lock()
        try:
            self._remove_stale()
            self.fs_type = fs_type_of(path)
            self.direct, self.device = self._probe()
            self.device_name = device_name(self.device)
        except OSError as error:
            os.close(self._lock_fd)
            raise self._unusable(error) from error
        way = "O_DIRECT" if self.direct else "buffered I/O, because O_DIRECT does not work on it"
        _log.info("scratch %s: %s, %s", path, self.fs_type, way)
        if self.fs_type in IN_RAM:
            _log.warning(
                "scratch %s is on %s, which is memory: what is offloaded to it frees none; "
                "choose a directory on a disk with --scratch (DISCOD_SCRATCH)",
                path,
                self.fs_type,
            )

    def __str__(self) -> str:
        return str(self.path)

    def create(self, quota: Budget, user: int | None = None) -> ScratchFile:
        """A new, empty file that will grow within ``quota``. Raises ``OSError``.

        Args:
            quota: The scratch bytes of all clients.
            user: The uid of the client that it is for, when that is not our own user.
        """
        fd = self._open_here()
        if user is not None:
            try:
                mark_owner(fd, user)
            except OSError:
                os.close(fd)
                raise
        return self._file(fd, quota)

    def check(self) -> None:
        """Write and read in a new file, as :class:`discod.health.Outages` wants it.

        A full disk is no failing one. Raises ``OSError``.
        """
        fd = self._open_here()
        try:
            write_and_read(fd, self._io)
            if not self.direct:
                self._io.write_back(fd, 0, PAGE_BYTES)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
        finally:
            os.close(fd)

    def adopt(self, path_fd: int, quota: Budget, user: int | None = None) -> ScratchFile:
        """The file that another fd of it names, in the state in which it is.

        When the device fails, the client gets what can be had: a file that can only be read, or
        of which every use raises. Its other files may be well.

        Args:
            path_fd: A foreign fd: its file system is asked nothing until it is known to be ours.
            quota, user: As for :meth:`create`.

        Raises:
            ForeignFile: It has a name, or another owner, mode or device than our files, or it was
                made for another user's client.
            OSError: It cannot be opened, for another reason.
        """
        status = stat_known(path_fd)
        flaws = {
            "no regular file": not stat.S_ISREG(status.mode),
            "a file with a name": status.nlink != 0,
            f"of uid {status.uid}": status.uid != os.geteuid(),
            f"of mode {status.mode & 0o7777:o}": status.mode & 0o7777 != FILE_MODE,
            "on another file system": status.device != self.device,
        }
        found = [flaw for flaw, is_so in flaws.items() if is_so]
        if found:
            raise ForeignFile(f"it is {', '.join(found)}")
        path = f"/proc/self/fd/{path_fd}"
        flags = os.O_DIRECT if self.direct else 0
        broken: dict[int, OSError] = {}
        for way in (os.O_RDWR, os.O_RDONLY):
            try:
                fd = self._io.open(path, flags | way, 0)
            except OSError as error:
                if error.errno not in DEVICE_ERRORS:
                    raise
                broken[way] = error
                continue
            try:
                check_owner(fd, user)
            except NotTheOwner as error:
                os.close(fd)
                raise ForeignFile(str(error)) from None
            return self._file(fd, quota, broken)
        return self._file(os.dup(path_fd), quota, broken)

    def made(self, path_fd: int) -> bool:
        """Whether the file was made in this very directory, as far as the kernel tells."""
        here = os.readlink(f"/proc/self/fd/{self._lock_fd}")
        return os.path.dirname(os.readlink(f"/proc/self/fd/{path_fd}")) == here

    def free_bytes(self) -> int:
        """What its file system has free for users; 0 when it does not say."""
        try:
            status = os.fstatvfs(self._lock_fd)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Unlock."""
        os.close(self._lock_fd)

    def _file(
        self, fd: int, quota: Budget, broken: Mapping[int, OSError] | None = None
    ) -> ScratchFile:
        try:
            return ScratchFile(
                fd, str(self.path), self.direct, quota, self._io, self.health, broken or {}
            )
        except OSError:
            os.close(fd)
            raise

    def _lock(self) -> int:
        try:
            return lock_directory(self.path)
        except Locked as error:
            raise StartupError(
                Exit.SCRATCH_LOCKED,
                f"scratch {self.path} is in use by another daemon ({error.holder}): not started; "
                "stop that daemon, or give this one a directory of its own with --scratch",
            ) from error
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StartupError:
        reason = f"{error.strerror} (errno {error.errno})"
        match error.errno:
            case errno.ENOENT if self.path.is_dir():
                # What /proc and its like say to any new file; "no such directory" would mislead.
                code = Exit.SCRATCH_UNUSABLE
                reason = f"its file system takes no files, {reason}"
                remedy = "choose a directory on a disk with --scratch"
            case errno.ENOENT:
                code, remedy = Exit.SCRATCH_MISSING, "create it, or correct --scratch"
            case errno.ENOTDIR:
                code, remedy = Exit.SCRATCH_NOT_A_DIRECTORY, "give --scratch a directory"
            case errno.EROFS | errno.EACCES | errno.EPERM:
                code = Exit.SCRATCH_READ_ONLY
                remedy = f"make it writable for uid {os.geteuid()}, or choose another --scratch"
            case _:
                code, remedy = Exit.SCRATCH_UNUSABLE, "choose another --scratch"
        text = f"scratch {self.path} cannot be used: {reason}; not started; {remedy}"
        return StartupError(code, text)

    def _remove_stale(self) -> None:
        """Remove files that a daemon left which was killed before it could unlink them."""
        for entry in os.scandir(self._lock_fd):
            if not entry.name.startswith(FILE_PREFIX) or not entry.is_file(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(entry.name, dir_fd=self._lock_fd)
                _log.info("removed %s, left by a daemon that was killed", self.path / entry.name)

    def _open_new(self, direct: bool) -> int:
        return open_nameless(self.path, self._io, direct)

    def _open_here(self) -> int:
        """A nameless file on the device that this directory was on at the start."""
        fd = self._open_new(self.direct)
        if os.fstat(fd).st_dev != self.device:
            os.close(fd)
            # Else a disk that was unmounted would be replaced by the one that its directory is on.
            raise OSError(errno.ENODEV, f"another file system is mounted on {self.path} by now")
        return fd

    def _probe(self) -> tuple[bool, int]:
        """Whether O_DIRECT really works here, and the device of files made here."""
        with contextlib.suppress(OSError):
            fd = self._open_new(direct=True)
            try:
                write_and_read(fd, self._io)
                return True, os.fstat(fd).st_dev
            except OSError as error:
                # A full disk says nothing about O_DIRECT, which could be opened.
                if error.errno in _NO_SPACE:
                    return True, os.fstat(fd).st_dev
            finally:
                os.close(fd)
        fd = self._open_new(direct=False)
        try:
            return False, os.fstat(fd).st_dev
        finally:
            os.close(fd)
