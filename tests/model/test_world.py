"""Random programs on the simulated world: whatever dies, no byte is lost and nothing is left.

``DISCOD_TEST_SEED`` and ``DISCOD_MODEL_RUNS`` choose other and more of them.
"""

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_client.errors import ArenaFull
from tests.model.world import Crashed, Trainer, World

RUNS = int(os.environ.get("DISCOD_MODEL_RUNS", "60"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """On tmpfs where there is one: the disk is not what is tested here."""
    with tempfile.TemporaryDirectory(
        prefix="model-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as name:
        yield Path(name)


def program(world: World, chance: random.Random, operations: int) -> None:
    """What trainers do: saves, loads and frees in any order; they come and go."""
    for number in range(operations):
        if not world.trainers or (len(world.trainers) < 2 and chance.random() < 0.1):
            Trainer(world, f"trainer {number}", pages=chance.choice((6, 9, 16)))
        trainer = chance.choice(world.trainers)
        blobs = list(trainer.blobs)
        with contextlib.suppress(Crashed):
            operate(trainer, chance, blobs)
        world.go_on(0.1)


def operate(trainer: Trainer, chance: random.Random, blobs: list[int]) -> None:
    kind = chance.choice(("save", "save", "load", "load", "free", "drop", "prefetch", "close"))
    try:
        if kind == "save" and len(blobs) < 12:
            trainer.drop_views()
            trainer.save(chance.randint(1, 4))
        elif kind == "load" and blobs:
            trainer.load(chance.choice(blobs), keep=chance.random() < 0.2)
        elif kind == "free" and blobs:
            trainer.free(chance.choice(blobs))
        elif kind == "drop":
            trainer.drop_views()
        elif kind == "prefetch":
            trainer.prefetch()
        elif kind == "close" and chance.random() < 0.05:
            trainer.close()
    except ArenaFull:
        trainer.drop_views()


@pytest.mark.parametrize("run", range(RUNS))
def test_any_program_under_any_faults(run: int, folder: Path, first_seed: int) -> None:
    """A step would be lost, hang or compute with other bytes, by an order of events no one saw."""
    seed = first_seed * 1_000_003 + run
    chance = random.Random(seed)
    world = World(folder, seed, faults=chance.choice((3, 20, 60)))
    try:
        program(world, chance, 60)
        world.finish()
    finally:
        world.close()
