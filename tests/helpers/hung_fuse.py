"""A FUSE file system of one file whose server stops answering, as a dead NFS server does.

    python -m tests.helpers.hung_fuse MOUNT_POINT

It mounts in a mount namespace of its own, opens the file for reading and as ``O_PATH``, and then
answers nothing any more: fstat, fstatvfs and close of the first one never return. It sends both fds
over its standard input, a ``SOCK_SEQPACKET`` socket, and lives until that is closed. Then the
kernel lets all go who wait for an answer.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable

from discod.wire.fds import send_packet

_LOOKUP, _FORGET, _GETATTR, _OPEN, _STATFS, _FLUSH, _INIT, _ACCESS = 1, 2, 3, 14, 17, 25, 26, 34
_HEADER = struct.Struct("IIQQIIII")
_CLONE_NEWNS = 0x20000
_PR_SET_PDEATHSIG = 1
_MS_PRIVATE, _MS_REC = 1 << 18, 1 << 14

ROOT_NODE, FILE_NODE = 1, 2


def attributes(node: int) -> bytes:
    """``struct fuse_attr``: valid for no time at all, so that each fstat asks."""
    mode, links = (0o40755, 2) if node == ROOT_NODE else (0o100600, 1)
    times_and_sizes = struct.pack("6Q", node, 4096, 8, 0, 0, 0)
    return times_and_sizes + struct.pack("10I", 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)


def serve(fuse_fd: int, silent: Callable[[], bool]) -> None:
    """Answer until ``silent``, and then read requests without an answer."""
    while True:
        request = os.read(fuse_fd, 1 << 17)
        _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        if opcode == _FORGET or silent():
            continue
        body = {
            _INIT: struct.pack("IIIIHHIIHHI7I", 7, 31, 4096, 0, 4, 4, 4096, 1, 1, *[0] * 9),
            _LOOKUP: struct.pack("4QII", FILE_NODE, 0, 60, 0, 0, 0) + attributes(FILE_NODE),
            _GETATTR: struct.pack("QII", 0, 0, 0) + attributes(node),
            _OPEN: struct.pack("QII", 1, 0, 0),
            _STATFS: bytes(80),
            _ACCESS: b"",
            _FLUSH: b"",
        }.get(opcode)
        error = -38 if body is None else 0  # ENOSYS
        body = body or b""
        os.write(fuse_fd, struct.pack("IiQ", 16 + len(body), error, unique) + body)


def main() -> None:
    mount_point = sys.argv[1].encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_PRIVATE | _MS_REC, None):
        raise OSError(ctypes.get_errno(), "unshare")
    fuse_fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse_fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", mount_point, b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    # A server with a file of its own could not end: its last close would wait for itself.
    silent = mmap.mmap(-1, 1)
    parent = os.getpid()
    server = os.fork()
    if not server:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            serve(fuse_fd, lambda: silent[0] == 1)
        os._exit(0)
    os.close(fuse_fd)
    path = os.path.join(os.fsdecode(mount_point), "file")
    fds = [os.open(path, os.O_RDONLY), os.open(path, os.O_PATH)]
    silent[0] = 1
    with socket.socket(fileno=0) as other:
        send_packet(other, b"hung", fds)
        other.recv(1)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


if __name__ == "__main__":
    main()
