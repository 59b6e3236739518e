"""What a part is given, and what it gives back: a device, a place for its daemons, and rows."""

import math
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import disco_client
from disco_client import connection
from discod.wire.sizes import format_size
from tests.helpers.daemon import Daemon

T = TypeVar("T")

ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was looked at.
        value: What was found, in words or with its unit.
        goal: What it must be; empty where nothing is asked of it.
        ok: Whether it is so. None: nothing is asked of it, or it was left out.
        data: The figures behind it, for the JSON file.
        left_out: Whether it could not be looked at.
    """

    what: str
    value: str
    goal: str = ""
    ok: bool | None = None
    data: Any = None
    left_out: bool = False


def at_least(what: str, value: float, goal: float, note: str = "", data: Any = None) -> Row:
    """A row whose figure must be ``goal`` or more."""
    return Row(what, f"{value:.3f}{note}", f">= {goal}", value >= goal, data)


def at_most(what: str, value: float, goal: float, note: str = "", data: Any = None) -> Row:
    """A row whose figure must be ``goal`` or less."""
    return Row(what, f"{value:.3f}{note}", f"<= {goal}", value <= goal, data)


def left_out(what: str, why: str) -> Row:
    """A row for what cannot be looked at here."""
    return Row(what, f"left out: {why}", left_out=True)


def guarded(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """``rows``, an exception being one more row, which failed; so what comes after still runs."""
    try:
        yield from rows
    except Exception as error:  # noqa: BLE001  # whatever it is, the table says it and goes on
        traceback.print_exc()
        yield Row(what, f"{type(error).__name__}: {error}"[:ERROR_CHARS], "runs", False)


@dataclass(slots=True)
class Bench:
    """Where a part runs.

    Attributes:
        part: Its name.
        device: What to measure.
        quick: Whether to run in a tiny form, whose figures mean nothing.
        seconds: What the part may take, before it is killed.
        scratch: A directory of the part's own, on the disk to use.
        sockets: Another, with a path short enough for sockets.
        out: For files that stay.
    """

    part: str
    device: torch.device
    quick: bool
    seconds: float
    scratch: Path
    sockets: Path
    out: Path
    daemons: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in: bfloat16, which is slow on a CPU."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def pick(self, full: T, quick: T) -> T:
        """One of the two sizes."""
        return quick if self.quick else full

    def synchronize(self) -> None:
        """Until the device has done all that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def start_daemon(self) -> Daemon:
        """A daemon with directories of its own, ready; its log is in ``out``."""
        self.daemons += 1
        places = self.scratch / f"{self.daemons}", self.sockets / f"{self.daemons}"
        for place in places:
            place.mkdir(mode=0o700)
        return self.restart_daemon(*places)

    def restart_daemon(self, scratch: Path, socket_dir: Path) -> Daemon:
        """One with the directories of another that has ended, ready."""
        log_path = self.out / f"{self.part}.daemon.log"
        daemon = Daemon(scratch=scratch, socket_dir=socket_dir, log_path=log_path)
        daemon.wait_until_ready()
        return daemon

    @contextmanager
    def attached(self, **settings: Any) -> Iterator[Daemon]:
        """This process attached to a daemon of its own; ``settings`` are those of ``connect``."""
        daemon = self.start_daemon()
        try:
            disco_client.connect(daemon.socket_dir, **settings)
            try:
                yield daemon
            finally:
                disco_client.close()
        finally:
            daemon.close()


def transports(bench: Bench) -> list[dict[str, str]]:
    """``connect``'s settings for each transport that can be had here."""
    names = ("shared-memory", "cuda-ipc") if bench.on_gpu else ("shared-memory",)
    return [{"transport": name} for name in names]


def missing_transports(bench: Bench) -> Iterator[Row]:
    """A row for the transport that :func:`transports` has not."""
    if not bench.on_gpu:
        yield left_out("cuda-ipc", "needs a GPU")


def name_of(transport: dict[str, str]) -> str:
    """The transport's name."""
    return transport["transport"]


def ipc_use(bench: Bench, where: str, transport: dict[str, str], daemon: Daemon) -> Iterator[Row]:
    """Whether the daemon's GPU process did the copies: without it this one does, as well."""
    if transport["transport"] != "cuda-ipc":
        return
    copied_bytes = sum(gpu["copied_bytes"] for gpu in daemon.status()["gpus"])
    device = connection.current().store._devices.of(bench.device)
    gave_up = getattr(device, "_failed", True)
    value = f"{format_size(copied_bytes)}{', then it gave up' if gave_up else ''}"
    yield Row(f"copied by the daemon, {where}", value, "> 0", copied_bytes > 0 and not gave_up)


def leftovers(daemon: Daemon) -> list[str]:
    """What is in the daemon's directories besides its sockets."""
    found = [*os.listdir(daemon.scratch), *os.listdir(daemon.socket_dir)]
    return sorted(set(found) - {"attach.sock", "io.sock"})


def ratio(one: float, other: float) -> float:
    """``one / other``; infinite where ``other`` is 0."""
    return one / other if other else math.inf
