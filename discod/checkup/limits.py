"""The limits of processes that start as this one did: fds, locked memory, sizes of files."""

import resource
from collections.abc import Iterator

from discod.checkup.finding import Finding, ok, warn
from discod.descriptors import LEAST_LIMIT
from discod.wire.sizes import format_size

FDS_OF_A_CLIENT = 6
"""Attach connection, pidfd, arena, I/O connection, and scratch files in two directories."""


def check_limits(gpus: int) -> Iterator[Finding]:
    """The findings.

    Args:
        gpus: How many GPUs there are.
    """
    yield _fds()
    yield _locked_memory(gpus)
    yield _file_size()


def _fds() -> Finding:
    """The daemon raises its soft limit to the hard one, so that this one counts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check = "open files"
    if hard != resource.RLIM_INFINITY and hard < LEAST_LIMIT:
        found = (
            f"at most {hard} fds (RLIMIT_NOFILE): the daemon keeps {LEAST_LIMIT} in reach of a "
            "flood of connections, and refuses --allow-group with less"
        )
        remedy = "raise the hard limit: ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=65536"
        return warn(check, found, remedy)
    return ok(check, f"up to {_count(hard)} fds; a client takes about {FDS_OF_A_CLIENT}")


def _locked_memory(gpus: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    check = "locked memory"
    if hard == resource.RLIM_INFINITY and soft == resource.RLIM_INFINITY:
        return ok(check, "no limit (RLIMIT_MEMLOCK)")
    found = f"at most {_size(soft)} (RLIMIT_MEMLOCK, hard {_size(hard)})"
    if not gpus:
        return ok(check, f"{found}; it matters where arenas are pinned for a GPU: not here")
    return warn(
        check,
        f"{found}: an arena for a GPU may not get pinned beyond it, and its copies then make the "
        "training wait",
        "raise it for the trainers: ulimit -l unlimited, LimitMEMLOCK=infinity, "
        "docker run --ulimit memlock=-1",
    )


def _file_size() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    check = "file size"
    if soft == resource.RLIM_INFINITY:
        return ok(check, "no limit (RLIMIT_FSIZE)")
    found = f"files of at most {_size(soft)} (RLIMIT_FSIZE): arenas and scratch files are files"
    return warn(check, found, "raise it: ulimit -f unlimited, LimitFSIZE=infinity")


def _size(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)


def _count(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
