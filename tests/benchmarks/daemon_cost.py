"""``python -m tests.benchmarks.daemon_cost``: the daemon's CPU time for each byte, by blob size.

A bare client, without torch and without a policy, keeps its whole arena in flight: it writes
ascending through its file, as a forward pass does, and reads descending, as a backward pass does.
With ``--against TREE`` the daemon of another checkout runs too, and the two take turns round by
round, with the bare probe: only ratios within a run mean anything.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
import zmq
from rich.console import Console
from rich.table import Table

from disco_client.arena import Arena
from discod.wire.codec import decode, encode
from discod.wire.messages import Attached, Done, Failed, Read, Request, Write
from discod.wire.paths import socket_paths
from discod.wire.sizes import format_size, parse_size
from tests.benchmarks.frame import WrongBytes
from tests.benchmarks.reference import Probe
from tests.helpers.daemon import Daemon
from tests.helpers.raw_client import attach

STAMP_BYTES = 8
"""The number of each blob, at its start: what comes back is checked to be that blob."""


class Rank:
    """One client of one daemon.

    Args:
        socket_dir: The daemon's.
        arena_bytes: All of it is in flight, in blobs of one size at a time.
    """

    def __init__(self, socket_dir: Path, arena_bytes: int) -> None:
        self._arena = Arena(arena_bytes)
        self._arena.back(arena_bytes)
        self._lifeline, welcome, reply, self._files = attach(
            socket_dir, self._arena.size_bytes, [self._arena.fd]
        )
        if not isinstance(reply, Attached):
            raise RuntimeError(f"not attached: {reply}")
        self._epoch = welcome.epoch
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set(zmq.IDENTITY, reply.identity)
        self._dealer.set(zmq.SNDHWM, 0)
        self._dealer.set(zmq.RCVHWM, 0)
        self._dealer.connect(f"ipc://{socket_paths(socket_dir)[1]}")
        self._seq = 0
        self._tokens: list[bytes] = []

    def close(self) -> None:
        """Hang up."""
        self._lifeline.close()
        self._context.destroy(linger=0)
        self._arena.close()

    def write(self, blob_bytes: int, blobs: int) -> float:
        """Write all, ascending; the seconds it took."""

        def stamp(index: int, slot: int) -> None:
            self._arena.view[slot : slot + STAMP_BYTES] = index.to_bytes(STAMP_BYTES, "little")

        requests = [
            Write(0, self._epoch, 0, index * blob_bytes, self._slot(index, blob_bytes), blob_bytes)
            for index in range(blobs)
        ]
        seconds, answers = self._run(requests, blob_bytes, before=stamp)
        self._tokens = [answer.checksum for answer in answers]
        return seconds

    def read(self, blob_bytes: int, blobs: int) -> float:
        """Read all, descending; the seconds it took. Raises :class:`WrongBytes`."""

        def check(order: int, slot: int) -> None:
            found = int.from_bytes(self._arena.view[slot : slot + STAMP_BYTES], "little")
            if found != blobs - 1 - order:
                raise WrongBytes(f"blob {blobs - 1 - order} came back as {found}")

        requests = [
            Read(
                *(0, self._epoch, 0, (blobs - 1 - order) * blob_bytes),
                *(self._slot(order, blob_bytes), blob_bytes),
                *(self._tokens[blobs - 1 - order], False),
            )
            for order in range(blobs)
        ]
        seconds, _ = self._run(requests, blob_bytes, after=check)
        return seconds

    def _slot(self, index: int, blob_bytes: int) -> int:
        return index % (self._arena.size_bytes // blob_bytes) * blob_bytes

    def _run(
        self,
        requests: list[Write] | list[Read],
        blob_bytes: int,
        before: Callable[[int, int], None] = lambda index, slot: None,
        after: Callable[[int, int], None] = lambda index, slot: None,
    ) -> tuple[float, list[Done]]:
        """Send as many as there are slots, then each one when its slot's answer is there."""
        first = self._seq + 1
        bodies = [encode(_numbered(request, first + i)) for i, request in enumerate(requests)]
        self._seq += len(bodies)
        slots = self._arena.size_bytes // blob_bytes
        answers: dict[int, Done] = {}
        sent = 0
        start = time.perf_counter()
        while len(answers) < len(bodies):
            while sent < len(bodies) and (sent < slots or sent - slots in answers):
                before(sent, requests[sent].slot)
                self._dealer.send(bodies[sent])
                sent += 1
            answer = decode(self._dealer.recv(), Done, Failed)
            if not isinstance(answer, Done):
                raise WrongBytes(f"a request failed: {answer}")
            index = answer.seq - first
            after(index, requests[index].slot)
            answers[index] = answer
        return time.perf_counter() - start, [answers[i] for i in range(len(bodies))]


def _numbered(request: Request, seq: int) -> Request:
    fields = {name: getattr(request, name) for name in request.__dataclass_fields__}
    return type(request)(**fields | {"seq": seq})


@dataclass(slots=True)
class Figures:
    """Of one daemon, size and direction, one a round."""

    rates: list[float] = field(default_factory=list)
    cpu_seconds_per_gb: list[float] = field(default_factory=list)


class System:
    """A daemon of one tree, with its client, and its figures.

    Args:
        name: For the table.
        tree: The checkout that its ``discod`` comes from.
        directory: Where its scratch is made.
        arena_bytes: Its client's.
        options: More of the daemon's command line.
    """

    def __init__(
        self, name: str, tree: Path, directory: Path, arena_bytes: int, options: Sequence[str]
    ) -> None:
        self.name = name
        scratch = directory / "scratch"
        scratch.mkdir(parents=True)
        # A socket's path must be short, and needs no disk.
        self._sockets = tempfile.TemporaryDirectory(prefix="discod-bench-")
        sockets = Path(self._sockets.name)
        self._daemon = Daemon(
            *options,
            scratch=scratch,
            socket_dir=sockets,
            log_path=directory / "daemon.log",
            env={"PYTHONPATH": f"{tree}", "PYTHONSAFEPATH": "1"},
        )
        self._daemon.wait_until_ready()
        self._rank = Rank(sockets, arena_bytes)
        self.figures: dict[tuple[int, str], Figures] = {}

    def close(self) -> None:
        self._rank.close()
        self._daemon.close()
        self._sockets.cleanup()

    def cycle(self, blob_bytes: int, blobs: int, *, keep: bool) -> None:
        """Write and read all blobs, and ``keep`` what it took."""
        for direction, run in (("write", self._rank.write), ("read", self._rank.read)):
            cpu = cpu_seconds(self._daemon.pid)
            seconds = run(blob_bytes, blobs)
            cpu = cpu_seconds(self._daemon.pid) - cpu
            if keep:
                gb = blob_bytes * blobs / 1e9
                figures = self.figures.setdefault((blob_bytes, direction), Figures())
                figures.rates.append(gb / seconds)
                figures.cpu_seconds_per_gb.append(cpu / gb)


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, in nanoseconds' resolution, unlike its ``stat``."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def table(systems: list[System], probe: dict[str, list[float]]) -> Table:
    """Medians of all rounds."""
    result = Table(title="the daemon's cost, medians", title_justify="left")
    result.add_column("blobs", justify="right")
    result.add_column("")
    for system in systems:
        result.add_column(f"{system.name}: CPU-s/GB", justify="right")
        result.add_column("GB/s", justify="right")
        result.add_column("of the probe", justify="right")
    for blob_bytes, direction in systems[0].figures:
        reference = median(probe[direction])
        row = [format_size(blob_bytes) if direction == "write" else "", direction]
        for system in systems:
            figures = system.figures[blob_bytes, direction]
            cpu = figures.cpu_seconds_per_gb
            row += [
                f"{median(cpu):.3f} ({min(cpu):.3f}-{max(cpu):.3f})",
                f"{median(figures.rates):.2f}",
                f"{median(figures.rates) / reference:.2f}",
            ]
        result.add_row(*row)
    return result


@click.command()
@click.option(
    "--directory",
    default=Path(),
    show_default="the working directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="On the disk to measure; all files in it are temporary.",
)
@click.option("--blobs", default="64KiB,256KiB,1MiB,16MiB", show_default=True, help="Sizes.")
@click.option("--data", default="512MiB", show_default=True, help="Moved each way in a round.")
@click.option("--arena", default="128MiB", show_default=True, help="The client's.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Another checkout, whose daemon takes turns with this one's.",
)
@click.option("--option", "options", multiple=True, help="Of this daemon: --option=--threads=4.")
@click.option("--other-option", "other_options", multiple=True, help="Of the other one.")
def main(
    directory: Path,
    blobs: str,
    data: str,
    arena: str,
    rounds: int,
    against: Path | None,
    options: tuple[str, ...],
    other_options: tuple[str, ...],
) -> None:
    """Measure the daemon's CPU seconds per GB and its rate, by blob size."""
    data_bytes, arena_bytes = parse_size(data), parse_size(arena)
    sizes = [parse_size(size) for size in blobs.split(",")]
    trees = [("this", Path(__file__).parents[2], options)]
    if against is not None:
        trees.append(("other", against.resolve(), other_options))
    probe_rates: dict[str, list[float]] = {"write": [], "read": []}
    with ExitStack() as cleanup:
        where = Path(
            cleanup.enter_context(
                tempfile.TemporaryDirectory(prefix="discod-bench-", dir=directory.resolve())
            )
        )
        probe = Probe(where / "probe", data_bytes)
        cleanup.callback(probe.close)
        systems = []
        for name, tree, own in trees:
            system = System(name, tree, where / name, arena_bytes, own)
            cleanup.callback(system.close)
            systems.append(system)
        for blob_bytes in sizes:
            for number in range(rounds + 1):
                turn = systems if number % 2 else systems[::-1]
                for system in turn:
                    system.cycle(blob_bytes, data_bytes // blob_bytes, keep=number > 0)
                if number:
                    probe_rates["write"].append(probe.run("write") / 1e9)
                    probe_rates["read"].append(probe.run("read") / 1e9)
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(table(systems, probe_rates))


if __name__ == "__main__":
    main()
