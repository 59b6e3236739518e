"""All checks, side by side and within a time: what hangs or crashes takes no other with it."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from discod.checkup.client import check_client
from discod.checkup.container import check_container
from discod.checkup.daemon import check_daemon, look_for_daemon
from discod.checkup.errand import Answer, Errand
from discod.checkup.finding import Finding, warn
from discod.checkup.gpu import check_gpus, look_for_gpus
from discod.checkup.kernel import check_kernel
from discod.checkup.limits import check_limits
from discod.checkup.memory import check_memory
from discod.checkup.scratch import check_lock, check_scratch

MOST_SECONDS = 1.6
"""Until what has not answered is given up: the command as a whole has 2 s."""


@dataclass(slots=True)
class Section:
    """The findings about one kind of thing."""

    title: str
    findings: Sequence[Finding]


def examine(scratch: Sequence[Path], socket_dir: Path) -> list[Section]:
    """All findings, in sections. To be called while this process has one thread.

    Args:
        scratch: The scratch directories to look at; each once.
        socket_dir: Where to look for a daemon.
    """
    deadline = time.monotonic() + MOST_SECONDS
    places = {os.path.abspath(path): path for path in scratch}
    gpu_errand = Errand("GPU", _gpus)
    daemon_errand = Errand("daemon", partial(_daemon, socket_dir))
    scratch_errands = [
        Errand("scratch", partial(check_scratch, path), str(path)) for path in places.values()
    ]
    others = {
        title: Errand(title, partial(_plain, check))
        for title, check in (
            ("memory", check_memory),
            ("kernel", check_kernel),
            ("container", check_container),
            ("client", check_client),
        )
    }
    daemon, daemon_pid = daemon_errand.wait(deadline)
    gpus, gpu_count = gpu_errand.wait(deadline)
    directories: list[Finding] = []
    for path, errand in zip(places.values(), scratch_errands, strict=True):
        findings, holder = errand.wait(deadline)
        directories += [*findings, *check_lock(path, holder, daemon_pid)]
    if not scratch:
        said = "none was given, so that none was checked"
        directories = [warn("directory", said, "give --scratch DIR")]
    more = {title: errand.wait(deadline)[0] for title, errand in others.items()}
    found = {
        "scratch": directories,
        "daemon": daemon,
        "limits": [*check_limits(gpu_count)],
        **{title: more[title] for title in ("memory", "kernel", "container")},
        "GPU": gpus,
        "client": more["client"],
    }
    return [Section(title, findings) for title, findings in found.items()]


def _plain(check: Callable[[], Iterable[Finding]]) -> Answer:
    return list(check()), 0


def _daemon(socket_dir: Path) -> Answer:
    """The findings, and the daemon's pid."""
    daemon = look_for_daemon(socket_dir)
    return list(check_daemon(daemon)), daemon.pid


def _gpus() -> Answer:
    """The findings, and how many GPUs there are."""
    gpus = look_for_gpus()
    return list(check_gpus(gpus)), len(gpus.uuids or gpus.nodes)
