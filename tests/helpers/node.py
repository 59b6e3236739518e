"""Nodes of a cluster on one machine: namespaces of their own, joined by a virtual cable.

Each node has its own ``/run`` and a directory for its scratch, so its daemon and its ranks find
each other by the defaults, and nothing of another node. The addresses are those of the range for
documentation.
"""

import shlex
import subprocess
from pathlib import Path

from tests.helpers.jobs import ROOT

_NAMESPACES = ("--pid", "--net", "--uts", "--mount")
_UNSHARE = ("unshare", "--fork", "--kill-child", "--mount-proc", *_NAMESPACES)


class Node:
    """One node.

    Args:
        number: From 0.
    """

    INTERFACE = "cluster"

    def __init__(self, number: int) -> None:
        self.address = f"192.0.2.{number + 1}"
        hosts = ["127.0.0.1 localhost", *(f"192.0.2.{n + 1} node{n}" for n in range(2))]
        setup = [
            "mount -t tmpfs -o mode=755 tmpfs /run",
            f"printf '%s\\n' {shlex.join(hosts)} >/run/hosts",
            "mount --bind /run/hosts /etc/hosts",  # nobody answers a name server's questions here
            f"hostname node{number}",
            "ip link set lo up",
            "echo ready",
            "exec cat",  # until its standard input is closed
        ]
        self._holder = subprocess.Popen(
            [*_UNSHARE, "sh", "-euc", "\n".join(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"

    @property
    def pid(self) -> int:
        """Of the node's process 1, with which all others end."""
        outer = self._holder.pid
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text())

    @property
    def prefix(self) -> list[str]:
        """What comes before a command that is to run on the node."""
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES, f"--wdns={ROOT}"]

    def path(self, path: Path) -> Path:
        """A directory of the node, as it is seen from outside."""
        return Path(f"/proc/{self.pid}/root{path}")

    def run(self, command: str) -> None:
        """Run a command there, and fail when it does."""
        subprocess.run([*self.prefix, *shlex.split(command)], check=True, timeout=20)

    def close(self) -> None:
        """Remove it; what was mounted and linked goes with its last process."""
        self._holder.communicate()


def join(one: Node, other: Node) -> None:
    """Lay a cable between two nodes."""
    ends = f"{Node.INTERFACE} type veth peer name {Node.INTERFACE} netns {other.pid}"
    # The pid is one of the machine's: only the network is to be the node's.
    within = ["nsenter", f"--target={one.pid}", "--net"]
    subprocess.run([*within, "ip", "link", "add", *ends.split()], check=True, timeout=20)
    for node in (one, other):
        node.run(f"ip address add {node.address}/24 dev {Node.INTERFACE}")
        node.run(f"ip link set {Node.INTERFACE} up")
