"""What trainers do, as steps: saves, loads, ends of blobs, and the computing in between.

Every trace is made from a few lists of blobs; times are such that the disk is busy for a good part
of a step, and sizes such that about a third of what is saved fits.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

MIB = 1 << 20
BLOB_BYTES = 32 * MIB
FORWARD_SECONDS = 0.02
BACKWARD_SECONDS = 0.06
"""Of a layer under checkpointing: backward recomputes it, and is twice a forward itself."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The trainer computes for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Save:
    """A new blob."""

    blob: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """The blob is used, until :class:`Unload`."""

    blob: int


@dataclass(frozen=True, slots=True)
class Unload:
    """The use is over."""

    blob: int


@dataclass(frozen=True, slots=True)
class Free:
    """The handle is gone."""

    blob: int


Step = Compute | Save | Load | Unload | Free
Cycle = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A run of a trainer.

    Attributes:
        name: For the table.
        capacity_bytes: Size of the arena.
        cycles: The parts to tell apart: in training, its steps.
        steady: The first cycle in which nothing is new any more.
        regular: Whether each cycle from there on is like the last one.
    """

    name: str
    capacity_bytes: int
    cycles: tuple[Cycle, ...] = field(repr=False)
    steady: int = 2
    regular: bool = True


class Tape:
    """Writes a cycle down. Blobs are numbered through all tapes that share ``numbers``."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._steps: list[Step] = []

    def forward(self, sizes: Iterable[int], seconds: float = FORWARD_SECONDS) -> list[int]:
        """Layers that each save what they were given; the blobs."""
        blobs = []
        for size_bytes in sizes:
            blob = next(self._numbers)
            self._steps += [Save(blob, size_bytes), Compute(seconds)]
            blobs.append(blob)
        return blobs

    def backward(self, blobs: Iterable[int], seconds: float = BACKWARD_SECONDS) -> None:
        """Layers, in this order, that each use a blob for the last time."""
        for blob in blobs:
            self._steps += [Load(blob), Compute(seconds), Unload(blob), Free(blob)]

    def use(self, blobs: Iterable[int], seconds: float = BACKWARD_SECONDS) -> None:
        """As backward, and the blobs stay."""
        for blob in blobs:
            self._steps += [Load(blob), Compute(seconds), Unload(blob)]

    def drop(self, blobs: Iterable[int]) -> None:
        """Blobs that nothing will use any more."""
        self._steps += [Free(blob) for blob in blobs]

    def pause(self, seconds: float) -> None:
        """Anything else: the optimizer, communication."""
        self._steps.append(Compute(seconds))

    def end(self) -> Cycle:
        """What was written down."""
        return tuple(self._steps)


def plain(layers: int = 24, cycles: int = 5, part: float = 0.3, name: str = "plain") -> Trace:
    """Forward and backward of one model; ``part`` of it fits in the arena."""
    numbers = count()
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        blobs = tape.forward([BLOB_BYTES] * layers)
        tape.backward(reversed(blobs))
        tape.pause(0.1)
        done.append(tape.end())
    return Trace(name, int(layers * part) * BLOB_BYTES, tuple(done))


def accumulation(microbatches: int = 4, layers: int = 16, cycles: int = 3) -> Trace:
    """Gradient accumulation: several forwards and backwards a step."""
    numbers = count()
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        for _ in range(microbatches):
            tape.backward(reversed(tape.forward([BLOB_BYTES] * layers)))
        tape.pause(0.1)
        done.append(tape.end())
    return Trace("accumulation", layers // 3 * BLOB_BYTES, tuple(done))


def pipeline(
    stage: int, stages: int = 4, microbatches: int = 6, layers: int = 12, cycles: int = 3
) -> Trace:
    """1F1B: warm-up forwards, then a forward and a backward in turns, then the last backwards."""
    numbers = count()
    done = []
    warm = min(stages - 1 - stage, microbatches)
    for _ in range(cycles):
        tape = Tape(numbers)
        alive: list[list[int]] = [tape.forward([BLOB_BYTES] * layers) for _ in range(warm)]
        for _ in range(microbatches - warm):
            alive.append(tape.forward([BLOB_BYTES] * layers))
            tape.backward(reversed(alive.pop(0)))
        for blobs in alive:
            tape.backward(reversed(blobs))
        done.append(tape.end())
    capacity = max(3, (warm + 1) * layers // 3) * BLOB_BYTES
    return Trace(f"1F1B, stage {stage} of {stages}", capacity, tuple(done))


def interleaved(
    stage: int = 0,
    stages: int = 2,
    chunks: int = 2,
    microbatches: int = 6,
    layers: int = 6,
    cycles: int = 3,
) -> Trace:
    """Interleaved 1F1B: a stage has several parts of the model, ``stages`` microbatches each turn.

    The order is that of Megatron-LM's schedule: forwards go through the chunks in groups of as
    many microbatches as there are stages, backwards through the chunks from the last one.
    """
    numbers = count()
    total = microbatches * chunks
    warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        alive: dict[int, list[list[int]]] = {chunk: [] for chunk in range(chunks)}

        def forward(
            turn: int, tape: Tape = tape, alive: dict[int, list[list[int]]] = alive
        ) -> None:
            chunk = turn // stages % chunks
            alive[chunk].append(tape.forward([BLOB_BYTES] * layers))

        def backward(
            turn: int, tape: Tape = tape, alive: dict[int, list[list[int]]] = alive
        ) -> None:
            chunk = chunks - 1 - turn // stages % chunks
            tape.backward(reversed(alive[chunk].pop(0)))

        for turn in range(warm):
            forward(turn)
        for turn in range(total - warm):
            forward(warm + turn)
            backward(turn)
        for turn in range(total - warm, total):
            backward(turn)
        done.append(tape.end())
    capacity = (warm + 1) * layers // 3 * BLOB_BYTES
    return Trace(f"interleaved 1F1B, stage {stage} of {stages}", capacity, tuple(done))


def endless_pipeline(layers: int = 6, depth: int = 4, cycles: int = 5) -> Trace:
    """A pipeline that is never emptied: the next step's forwards begin among the last backwards."""
    numbers = count()
    alive: list[list[int]] = []
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        for _ in range(2 * depth):
            alive.append(tape.forward([BLOB_BYTES] * layers))
            if len(alive) > depth:
                tape.backward(reversed(alive.pop(0)))
        done.append(tape.end())
    return Trace("endless pipeline", (depth + 1) * layers // 3 * BLOB_BYTES, tuple(done), steady=3)


def keeper(layers: int = 18, cycles: int = 12) -> Trace:
    """Plain training, while someone keeps one blob of the first step for ever."""
    numbers = count()
    done = []
    for number in range(cycles):
        tape = Tape(numbers)
        if number == 0:
            tape.forward([BLOB_BYTES])
        tape.backward(reversed(tape.forward([BLOB_BYTES] * layers)))
        tape.pause(0.1)
        done.append(tape.end())
    return Trace("a blob kept for ever", layers // 3 * BLOB_BYTES, tuple(done), steady=10)


def preference(layers: int = 16, pairs: int = 2, cycles: int = 5) -> Trace:
    """DPO: chosen and rejected go forward one after the other, then backward through both.

    The reference model's forwards save nothing.
    """
    numbers = count()
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        for _ in range(pairs):
            tape.pause(2 * layers * FORWARD_SECONDS)
            chosen = tape.forward([BLOB_BYTES] * layers)
            rejected = tape.forward([BLOB_BYTES] * layers)
            tape.backward(reversed(chosen + rejected))
        tape.pause(0.1)
        done.append(tape.end())
    return Trace("DPO", 2 * layers // 3 * BLOB_BYTES, tuple(done))


def policy_gradient(layers: int = 12, samples: int = 3, cycles: int = 5) -> Trace:
    """GRPO: forwards of several samples, one of them without a backward; backwards in order."""
    numbers = count()
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        graphs = [tape.forward([BLOB_BYTES] * layers) for _ in range(samples)]
        tape.drop(tape.forward([BLOB_BYTES] * layers))
        for graph in graphs:
            tape.backward(reversed(graph))
        tape.pause(0.1)
        done.append(tape.end())
    return Trace("GRPO", samples * layers // 3 * BLOB_BYTES, tuple(done))


def retained(layers: int = 16, cycles: int = 5) -> Trace:
    """A graph that is kept for a second backward."""
    numbers = count()
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        blobs = tape.forward([BLOB_BYTES] * layers)
        tape.use(reversed(blobs))
        tape.backward(reversed(blobs))
        done.append(tape.end())
    return Trace("two backwards", layers // 3 * BLOB_BYTES, tuple(done))


def mixed_sizes(layers: int = 9, cycles: int = 4) -> Trace:
    """``offload()``: each layer saves tensors of several sizes."""
    numbers = count()
    sizes = [BLOB_BYTES, BLOB_BYTES // 4, BLOB_BYTES * 3 // 4, BLOB_BYTES * 2]
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        blobs = tape.forward(sizes * layers, FORWARD_SECONDS / 2)
        tape.backward(reversed(blobs), BACKWARD_SECONDS / 2)
        done.append(tape.end())
    return Trace("mixed sizes", sum(sizes) * layers // 3 // MIB * MIB, tuple(done))


def packed(layers: int = 24, cycles: int = 8, seed: int = 0) -> Trace:
    """Packed or padded sequences: each step has another size, the order is the same."""
    numbers = count()
    rng = random.Random(seed)
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        size_bytes = rng.randint(5, 10) * BLOB_BYTES // 10 // MIB * MIB
        pace = size_bytes / BLOB_BYTES
        blobs = tape.forward([size_bytes] * layers, FORWARD_SECONDS * pace)
        tape.backward(reversed(blobs), BACKWARD_SECONDS * pace)
        done.append(tape.end())
    return Trace("packed sequences", layers // 3 * BLOB_BYTES, tuple(done), regular=False)


def packed_pipeline(
    layers: int = 6, microbatches: int = 8, cycles: int = 5, seed: int = 0
) -> Trace:
    """A 1F1B stage whose microbatches have sizes of their own in each step."""
    numbers = count()
    rng = random.Random(seed)
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        sizes = [rng.randint(5, 10) * BLOB_BYTES // 10 // MIB * MIB for _ in range(microbatches)]
        alive = []
        for number, size_bytes in enumerate(sizes):
            alive.append(tape.forward([size_bytes] * layers))
            if number >= 3:
                tape.backward(reversed(alive.pop(0)))
        for blobs in alive:
            tape.backward(reversed(blobs))
        done.append(tape.end())
    capacity = 4 * layers // 3 * BLOB_BYTES
    return Trace("packed sequences, 1F1B", capacity, tuple(done), regular=False)


def shuffled(layers: int = 24, cycles: int = 8, seed: int = 0) -> Trace:
    """Backward comes in another order in each step."""
    numbers = count()
    rng = random.Random(seed)
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        blobs = tape.forward([BLOB_BYTES] * layers)
        rng.shuffle(blobs)
        tape.backward(blobs)
        done.append(tape.end())
    return Trace("an order never the same", layers // 3 * BLOB_BYTES, tuple(done), regular=False)


def failing(layers: int = 24, cycles: int = 8, seed: int = 0) -> Trace:
    """Every second step ends in an exception, somewhere in forward or backward."""
    numbers = count()
    rng = random.Random(seed)
    done = []
    for number in range(cycles):
        tape = Tape(numbers)
        end = rng.randrange(2 * layers) if number % 2 else 2 * layers
        blobs = tape.forward([BLOB_BYTES] * min(layers, end + 1))
        back = max(0, end - layers)
        tape.backward(blobs[::-1][:back])
        tape.drop(blobs[: len(blobs) - back])
        tape.pause(0.1)
        done.append(tape.end())
    return Trace("exceptions", layers // 3 * BLOB_BYTES, tuple(done), regular=False)


def unread(layers: int = 24, cycles: int = 5) -> Trace:
    """A third of the blobs are never loaded; they go with their neighbours."""
    numbers = count()
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        blobs = tape.forward([BLOB_BYTES] * layers)
        for position in reversed(range(layers)):
            end = tape.drop if position % 3 == 1 else tape.backward
            end([blobs[position]])
        done.append(tape.end())
    return Trace("freed unread", layers // 3 * BLOB_BYTES, tuple(done))


def evaluated(layers: int = 24, cycles: int = 6) -> Trace:
    """An evaluation, whose forward saves and drops everything, after each training step."""
    numbers = count()
    done = []
    for _ in range(cycles):
        tape = Tape(numbers)
        tape.backward(reversed(tape.forward([BLOB_BYTES] * layers)))
        for _ in range(2):
            tape.drop(tape.forward([BLOB_BYTES] * layers))
        done.append(tape.end())
    return Trace("evaluation between steps", layers // 3 * BLOB_BYTES, tuple(done))


def all_traces() -> Sequence[Trace]:
    """All of them."""
    return (
        plain(),
        plain(part=1.0, name="plain, all fits"),
        plain(part=0.9, name="plain, 90 % fits"),
        plain(part=0.1, name="plain, 10 % fits"),
        accumulation(),
        *(pipeline(stage) for stage in (0, 2, 3)),
        interleaved(),
        endless_pipeline(),
        keeper(),
        preference(),
        policy_gradient(),
        retained(),
        mixed_sizes(),
        packed(),
        packed_pipeline(),
        shuffled(),
        failing(),
        unread(),
        evaluated(),
    )
