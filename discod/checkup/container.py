"""Whether this process is in a container, and what that means between daemon and trainers."""

import os
from collections.abc import Iterator
from pathlib import Path

from discod.checkup.finding import Finding, ok

FIRST_PID_NAMESPACE = 4026531836
FIRST_USER_NAMESPACE = 4026531837
FIRST_IPC_NAMESPACE = 4026531839
"""Of the machine itself: fixed numbers in the kernel (proc_ns.h)."""


def check_container(root: Path = Path("/")) -> Iterator[Finding]:
    """The findings; ``root`` is where /proc is."""
    inner = [
        name
        for name, first in (("pid", FIRST_PID_NAMESPACE), ("ipc", FIRST_IPC_NAMESPACE))
        if _namespace(root, name) not in (first, None)
    ]
    if inner:
        yield ok(
            "namespaces",
            f"an own {' and '.join(inner)} namespace, as in a container: daemon and trainers need "
            "the socket directory in common and no more; for transport=cuda-ipc they must be in "
            "the same pid and ipc namespaces",
        )
    else:
        yield ok("namespaces", "the machine's own, or not known: this is no container")
    if _namespace(root, "user") not in (FIRST_USER_NAMESPACE, None):
        yield ok(
            "users",
            f"a user namespace of its own: uid {os.geteuid()} here is {_outside(root)} outside, "
            "which is whom a daemon or a client out there sees",
        )


def _namespace(root: Path, name: str) -> int | None:
    try:
        text = os.readlink(root / "proc/self/ns" / name)
        return int(text.partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return None


def _outside(root: Path) -> str:
    """What our uid is in the namespace around this one, as uid_map has it."""
    try:
        for line in (root / "proc/self/uid_map").read_text().splitlines():
            first, outer, count = map(int, line.split())
            if first <= os.geteuid() < first + count:
                return f"uid {outer + os.geteuid() - first}"
    except (OSError, ValueError):
        pass
    return "an unknown uid"
