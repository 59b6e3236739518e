"""A trainer with a policy and a disk: plays a trace, and counts bytes and seconds waited.

As in the client, what has ended on the disk is taken in when the trainer calls, and not while it
computes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from disco_client.blobs import Group
from disco_client.instructions import (
    Cancel,
    Instruction,
    Promote,
    StartRead,
    StartWrite,
    WriteFailure,
)
from discod.schedule import Priority
from discod.wire.messages import Failure
from tests.simulation.disk import Disk, Rates
from tests.simulation.traces import Compute, Free, Load, Save, Step, Trace, Unload


class Policy(Protocol):
    """What :class:`disco_client.residency.Residency` and those to compare it with can do.

    Its docstrings say what each call is.
    """

    written_bytes: int
    read_bytes: int

    def try_place(self, size_bytes: int, group: Group) -> tuple[int | None, list[Instruction]]: ...

    def filled(self, blob: int) -> list[Instruction]: ...

    def load(self, blob: int) -> tuple[bool, list[Instruction]]: ...

    def unpin(self, blob: int) -> list[Instruction]: ...

    def free(self, blob: int) -> list[Instruction]: ...

    def write_done(self, blob: int, failure: WriteFailure | None = None) -> list[Instruction]: ...

    def read_done(
        self, blob: int, error: Exception | None = None, cancelled: bool = False
    ) -> list[Instruction]: ...


class Deadlock(Exception):
    """The policy says to wait, and nothing is under way that would ever end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cycle, or some of them, took."""

    written_bytes: int = 0
    read_bytes: int = 0
    computed_seconds: float = 0.0
    save_wait_seconds: float = 0.0
    load_wait_seconds: float = 0.0

    @property
    def waited_seconds(self) -> float:
        """For room and for reads."""
        return self.save_wait_seconds + self.load_wait_seconds

    def __add__(self, other: "Outcome") -> "Outcome":
        return self._with(other, 1)

    def __sub__(self, other: "Outcome") -> "Outcome":
        return self._with(other, -1)

    def _with(self, other: "Outcome", sign: int) -> "Outcome":
        names = Outcome.__match_args__
        return Outcome(*(getattr(self, name) + sign * getattr(other, name) for name in names))


class Machine:
    """Plays steps.

    Args:
        policy: Decides.
        rates: The disk's.
    """

    def __init__(self, policy: Policy, rates: Rates) -> None:
        self._policy = policy
        self._disk = Disk(rates)
        self._group = Group()
        self._blobs: dict[int, int] = {}
        self._computed = 0.0
        self._save_wait = 0.0
        self._load_wait = 0.0

    @property
    def total(self) -> Outcome:
        """Since the start."""
        return Outcome(
            self._policy.written_bytes,
            self._policy.read_bytes,
            self._computed,
            self._save_wait,
            self._load_wait,
        )

    def play(self, steps: Iterable[Step]) -> Outcome:
        """Play them; what they took. What is under way at the end goes on in the next call."""
        before = self.total
        for step in steps:
            match step:
                case Compute(seconds):
                    self._computed += seconds
                    self._disk.run_until(self._disk.now + seconds)
                case Save(blob, size_bytes):
                    self._save(blob, size_bytes)
                case Load(blob):
                    self._load(blob)
                case Unload(blob):
                    self._take_in()
                    self._execute(self._policy.unpin(self._blobs[blob]))
                case Free(blob):
                    self._take_in()
                    self._execute(self._policy.free(self._blobs.pop(blob)))
        self._take_in()
        return self.total - before

    def _save(self, blob: int, size_bytes: int) -> None:
        began = self._disk.now
        while True:
            self._take_in()
            placed, instructions = self._policy.try_place(size_bytes, self._group)
            self._execute(instructions)
            if placed is not None:
                break
            self._wait(f"blob {blob} is to be saved")
        self._blobs[blob] = placed
        self._execute(self._policy.filled(placed))
        self._save_wait += self._disk.now - began

    def _load(self, blob: int) -> None:
        began = self._disk.now
        while True:
            self._take_in()
            ready, instructions = self._policy.load(self._blobs[blob])
            self._execute(instructions)
            if ready:
                break
            self._wait(f"blob {blob} is to be loaded")
        self._load_wait += self._disk.now - began

    def _wait(self, why: str) -> None:
        if not self._disk.busy:
            raise Deadlock(why)
        self._disk.run_until_ended()

    def _take_in(self) -> None:
        while ended := self._disk.take_ended():
            for request in ended:
                if request.writes:
                    failure = WriteFailure(Failure.CANCELLED) if request.cancelled else None
                    self._execute(self._policy.write_done(request.blob, failure))
                else:
                    done = self._policy.read_done(request.blob, cancelled=request.cancelled)
                    self._execute(done)

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartWrite(blob, size_bytes=size_bytes):
                    self._disk.submit(blob, Priority.WRITE, size_bytes)
                case StartRead(blob, size_bytes=size_bytes, urgent=urgent):
                    priority = Priority.URGENT if urgent else Priority.PREFETCH
                    self._disk.submit(blob, priority, size_bytes)
                case Promote(blob):
                    self._disk.promote(blob)
                case Cancel(blob):
                    self._disk.cancel(blob)


def play(trace: Trace, policy: Policy, rates: Rates) -> list[Outcome]:
    """What each cycle took. Deadlock and any fault of the policy's raise."""
    machine = Machine(policy, rates)
    return [machine.play(cycle) for cycle in trace.cycles]
