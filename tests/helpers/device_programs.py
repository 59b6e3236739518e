"""Random programs over a simulated device, with a model of what every load must give.

A program returns its faults, so that a test of the client expects none, and a test of the
simulation, with one of the client's protections taken away, expects some.
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from disco_client.errors import BlobModified, DiscodError
from disco_client.residency import Group
from discod.wire import PAGE_BYTES
from tests.helpers.device_rig import Rig

MOST_WAITS = 20_000
"""In one program: more of them are a hang."""


class Hang(RuntimeError):
    """A call that waits for what never comes."""


@dataclass(eq=False)
class Saved:
    """What was saved, and whether its loss would be in order."""

    stored: Any
    value: Any
    source: Any
    at_once: bool
    may_be_lost: bool = False


@dataclass(eq=False)
class Source:
    """A tensor of the program's. ``value``: what its stream's order makes of it."""

    tensor: torch.Tensor
    value: Any
    stream: Any = None


@dataclass
class Program:
    """What both kinds have. ``troubles``: interrupts, failures and shortages happen."""

    rig: Rig
    random: random.Random
    troubles: bool = False
    sources: list[Source] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    waits: int = 0

    def __post_init__(self) -> None:
        self.rig.daemon.when_waiting = self._wait
        self.rig.gpu.fail = self._copy
        self.groups = [Group(), Group(max_prefetch=1, max_writes=1, to_device=False)]

    def run(self, steps: int) -> list[str]:
        """Make that many steps; the faults."""
        for _ in range(steps):
            self.step(self.random.choice(self.steps()))
        self.troubles = False
        self.rig.gpu.out_of_memory = 0
        while self.saved:
            self.step(lambda: self.load(self.saved[-1]))
            self.saved.pop()
        self.end()
        self.sources.clear()
        self.rig.machine.finish()
        self.faults += self.rig.machine.violations + self.rig.daemon.violations
        if not self.faults:
            self.rig.finish()
        return self.faults

    def steps(self) -> list[Callable[[], None]]:
        """What may happen next, the likely ones several times."""
        raise NotImplementedError

    def load(self, saved: Saved) -> None:
        """Load it, and look at it sooner or later."""
        raise NotImplementedError

    def end(self) -> None:
        """Look at what was loaded."""

    def step(self, action: Callable[[], None]) -> None:
        """Do it; what goes wrong and should not is a fault."""
        if self.troubles and self.random.random() < 0.05:
            self.rig.gpu.out_of_memory = self.random.choice((1, 1, 2))
        try:
            action()
        except KeyboardInterrupt as interrupt:
            interrupt.__traceback__ = None
        except _Broken:
            pass
        except (DiscodError, RuntimeError) as error:
            if not (self.troubles and isinstance(error, torch.OutOfMemoryError)):
                self.faults.append(f"{type(error).__name__}: {error}")
        self.rig.gpu.out_of_memory = 0
        self.check_bounds()

    def check_bounds(self) -> None:
        """One copy each way may be of any size; more of them are bounded."""
        staging, limit = self.rig.session._staging, self.rig.gpu.limit_bytes
        leaving = [copy.nbytes for copies in staging._leaving.values() for _, copy in copies]
        ahead = [arrival.nbytes for arrival in staging._ahead.values()]
        if sum(leaving) != sum(staging._leaving_bytes.values()):
            self.faults.append("the bytes under way are not what is counted")
        if sum(ahead) != sum(staging._ahead_bytes.values()):
            self.faults.append("the bytes brought ahead are not what is counted")
        for copies in (leaving, ahead):
            if len(copies) > 1 and sum(copies) > limit:
                self.faults.append(f"{sum(copies)} bytes are under way; {limit} may be")

    def keep(self, stored: Any, source: Source, at_once: bool) -> None:
        """Note what was saved."""
        self.saved.append(Saved(stored, source.value, source, at_once))

    def note_change(self, source: Source) -> None:
        """Its saves that may not have landed may be lost."""
        for saved in self.saved:
            if saved.source is source and not saved.at_once:
                saved.may_be_lost = True

    def free(self) -> None:
        """Forget a save."""
        self.saved.remove(self.random.choice(self.saved))

    def group(self) -> Group:
        """One of the owners."""
        return self.random.choice(self.groups)

    def _wait(self) -> None:
        self.waits += 1
        if self.waits > MOST_WAITS:
            raise Hang("a call waits for ever")
        if self.troubles and self.random.random() < 0.02:
            raise KeyboardInterrupt

    def _copy(self) -> None:
        if self.troubles and self.random.random() < 0.05:
            raise self.random.choice((KeyboardInterrupt, _Broken))


class _Broken(RuntimeError):
    """The device's own error."""


class LazyProgram(Program):
    """Kernels on three streams, whose order is all that makes their values right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        machine = self.rig.machine
        self.streams = [machine.current_stream(torch.device("cpu"))]
        self.streams += [machine.compute_stream() for _ in range(2)]
        self.loaded: list[torch.Tensor] = []
        self.looks: list[tuple[list[bytes], int, int]] = []

    def steps(self) -> list[Callable[[], None]]:
        """What may happen next."""
        steps = [self.make, self.make, self.noise]
        if self.sources:
            steps += [self.save] * 4 + [self.save_and_change] * 2
            steps += [self.change, self.drop, self.drop, self.synchronize]
        if self.saved:
            steps += [lambda: self.load(self.random.choice(self.saved))] * 3
            steps += [lambda: self.load(self.saved[-1])] * 2
            steps += [self.load_elsewhere, self.free, self.free]
        if self.loaded:
            steps += [self.unload, self.unload, self.overwrite]
        return steps

    def any_stream(self) -> Any:
        """A context in which one of the streams is current."""
        return self.rig.machine.stream(self.random.choice(self.streams))

    def make(self) -> None:
        with self.any_stream():
            value = self.random.randrange(1, 250)
            tensor = self.rig.value(value, self.random.choice((1, 1, 2)))
            stream = self.rig.machine.current_stream(torch.device("cpu"))
        self.sources.append(Source(tensor, value, stream))

    def noise(self) -> None:
        """Temporaries, whose memory is that of whatever was freed last."""
        with self.any_stream():
            for pages in (1, 2):
                self.rig.value(0xEE, pages)

    def synchronize(self) -> None:
        """As ``.item()`` does it."""
        self.random.choice(self.streams).synchronize()

    def save_and_change(self) -> None:
        """By hand, and in place on the same stream, which then comes to its end."""
        source = self.random.choice(self.sources)
        with self.rig.machine.stream(source.stream):
            stored = self.rig.save(source.tensor, at_once=True, group=self.group())
        self.keep(stored, source, at_once=True)
        self.change_in_place(source)
        if self.random.random() < 0.5:
            source.stream.synchronize()

    def save(self) -> None:
        source = self.random.choice(self.sources)
        at_once = self.random.random() < 0.3
        stream = self.random.choice((source.stream, source.stream, self.streams[0]))
        if stream is not source.stream:
            stream.wait_stream(source.stream)
        with self.rig.machine.stream(stream):
            stored = self.rig.save(source.tensor, at_once=at_once, group=self.group())
        self.keep(stored, source, at_once)

    def change(self) -> None:
        """In place, after all that other streams were given, as a program has to see to."""
        self.change_in_place(self.random.choice(self.sources))

    def change_in_place(self, source: Source) -> None:
        for stream in self.streams:
            if stream is not source.stream:
                source.stream.wait_stream(stream)
        source.value = self.random.randrange(1, 250)
        with self.rig.machine.stream(source.stream):
            self.rig.change(source.tensor, source.value)
        self.note_change(source)

    def drop(self) -> None:
        source = self.sources.pop(self.random.randrange(len(self.sources)))
        if self.random.random() < 0.5:
            with self.rig.machine.stream(source.stream):
                pages = source.tensor.nbytes // PAGE_BYTES
                del source.tensor
                self.rig.value(0xDD, pages)

    def load(self, saved: Saved) -> None:
        with self.any_stream():
            try:
                tensor = saved.stored.load()
            except BlobModified:
                if not saved.may_be_lost:
                    raise
                return
            self.looks.append((self.rig.seen(tensor), saved.value, tensor.nbytes))
        if self.random.random() < 0.5 and saved.at_once:
            self.loaded.append(tensor)

    def load_elsewhere(self) -> None:
        saved = self.random.choice(self.saved)
        try:
            found = self.rig.load_elsewhere(saved.stored)
        except BlobModified:
            if not saved.may_be_lost:
                raise
            return
        self.look(found, saved.value, saved.stored.spec.nbytes)

    def unload(self) -> None:
        self.loaded.pop(self.random.randrange(len(self.loaded)))

    def overwrite(self) -> None:
        """What was saved by hand is loaded into memory of its own, which may be changed."""
        with self.any_stream():
            stream = self.rig.machine.current_stream(torch.device("cpu"))
            for other in self.streams:
                if other is not stream:
                    stream.wait_stream(other)
            tensor = self.random.choice(self.loaded)
            self.rig.memory.record(tensor, stream)
            self.rig.change(tensor, 0xCC)

    def look(self, found: bytes, value: int, nbytes: int) -> None:
        if found != bytes([value]) * nbytes:
            wrong = next(byte for byte in found if byte != value)
            self.faults.append(f"found {wrong:#x} in place of {value:#x}")

    def end(self) -> None:
        self.loaded.clear()
        self.rig.machine.finish()
        for found, value, nbytes in self.looks:
            self.look(found[0], value, nbytes)


def _layouts(generator: random.Random) -> torch.Tensor:
    """A tensor that is a random view of random numbers."""
    dtype = generator.choice((torch.float32, torch.float64, torch.int16, torch.complex64))
    base = torch.randint(-100, 100, (generator.choice((32, 64)), 32)).to(dtype)
    view: Callable[[torch.Tensor], torch.Tensor] = generator.choice(
        (
            lambda t: t,
            lambda t: t.t(),
            lambda t: t[3:, 5:20],
            lambda t: t[:, ::2],
            lambda t: t[:1].expand(16, 32),
            lambda t: t.conj() if t.is_complex() else t.view(-1),
            lambda t: t.conj().imag if t.is_complex() else t.diagonal(),
            lambda t: t.unfold(0, 4, 2),
        )
    )
    return view(base)


class EagerProgram(Program):
    """Tensors of any layout, changed and freed as torch itself does it."""

    def steps(self) -> list[Callable[[], None]]:
        """What may happen next."""
        steps = [self.make, self.make]
        if self.sources:
            steps += [self.save] * 4 + [self.change, self.drop, self.shrink]
        if self.saved:
            steps += [lambda: self.load(self.random.choice(self.saved))] * 3
            steps += [lambda: self.load(self.saved[-1])] * 2
            steps += [self.free, self.free]
        return steps

    def make(self) -> None:
        tensor = _layouts(self.random)
        self.sources.append(Source(tensor, tensor.clone()))

    def save(self) -> None:
        source = self.random.choice(self.sources)
        at_once = self.random.random() < 0.3
        with contextlib.ExitStack() as stack:
            if self.random.random() < 0.1:
                stack.enter_context(torch.inference_mode())
                at_once = True
            stored = self.rig.save(source.tensor, at_once=at_once, group=self.group())
        self.keep(stored, source, at_once)

    def change(self) -> None:
        source = self.random.choice(self.sources)
        base = source.tensor if source.tensor._base is None else source.tensor._base
        base.mul_(-1).add_(self.random.randrange(1, 9))
        source.value = source.tensor.clone()
        self.note_change(source)

    def drop(self) -> None:
        self.sources.pop(self.random.randrange(len(self.sources)))

    def shrink(self) -> None:
        """The memory is given away under the tensor, as FSDP does it."""
        source = self.sources.pop(self.random.randrange(len(self.sources)))
        source.tensor.untyped_storage().resize_(0)
        self.note_change(source)
        # The copy reads what is somebody else's by then, and its bytes go nowhere.
        self.rig.machine.tolerates_shrunk = True

    def load(self, saved: Saved) -> None:
        try:
            tensor = saved.stored.load()
        except BlobModified:
            if not saved.may_be_lost:
                raise
            return
        if tensor.is_inference():
            self.faults.append("an inference tensor")
        if tensor.stride() != saved.stored.spec.stride:
            self.faults.append(f"strides {tensor.stride()}")
        if not torch.equal(tensor, saved.value):
            self.faults.append(f"wrong values of {tuple(tensor.shape)} {tensor.dtype}")


def run(
    kind: type[Program],
    seed: int,
    mode: str,
    *,
    steps: int = 40,
    troubles: bool = False,
    **rig: Any,
) -> list[str]:
    """A program of ``kind`` on a rig that its seed decides; its faults."""
    choice = random.Random(seed)
    settings: dict[str, Any] = {
        "pages": choice.choice((4, 6, 16)),
        "keep": choice.choice((0, 1, 3, None)),
        "limit_bytes": choice.choice((1, 2 * PAGE_BYTES, 1 << 20)),
        "lazy": kind is LazyProgram,
    }
    torch.manual_seed(seed)
    return kind(Rig(seed, mode, **(settings | rig)), choice, troubles).run(steps)
