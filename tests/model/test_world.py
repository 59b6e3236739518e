"""Random programs on the simulated world: whatever dies, no byte is lost and nothing is left.

``DISCOD_TEST_SEED`` and ``DISCOD_MODEL_RUNS`` choose other and more of them.
"""

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from disco_client.errors import ArenaFull
from tests.model.trainer import Crashed, Trainer
from tests.model.world import World

RUNS = int(os.environ.get("DISCOD_MODEL_RUNS", "30"))
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""On tmpfs where there is one: the disk is not what is tested here.

Named with a prefix that tests which look into /dev/shm at the same time know (``shm_entries``).
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty directory."""
    with tempfile.TemporaryDirectory(prefix="psm_discod-", dir=FOLDER) as name:
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


class Machine(RuleBasedStateMachine):
    """Steps and faults that hypothesis chooses, and makes fewer of until the reason is plain."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="psm_discod-", dir=FOLDER)
        self.world = World(Path(self.folder.name), seed=0, faults=0)
        Trainer(self.world, "first", pages=8)
        Trainer(self.world, "second", pages=8)

    @rule(which=st.integers(0, 1), pages=st.integers(1, 4))
    def save(self, which: int, pages: int) -> None:
        trainer = self.world.trainers[which]
        if len(trainer.blobs) < 8:
            trainer.save(pages)

    @rule(which=st.integers(0, 1), number=st.integers(0, 7))
    def load(self, which: int, number: int) -> None:
        trainer = self.world.trainers[which]
        if trainer.blobs:
            trainer.load(list(trainer.blobs)[number % len(trainer.blobs)])

    @rule(which=st.integers(0, 1), number=st.integers(0, 7))
    def free(self, which: int, number: int) -> None:
        trainer = self.world.trainers[which]
        if trainer.blobs:
            trainer.free(list(trainer.blobs)[number % len(trainer.blobs)])

    @rule(which=st.integers(0, 1))
    def prefetch(self, which: int) -> None:
        self.world.trainers[which].prefetch()

    @rule(seed=st.integers(0, 1000), rounds=st.integers(1, 5))
    def go_on(self, seed: int, rounds: int) -> None:
        self.world.chance.seed(seed)
        for _ in range(rounds):
            self.world.go_on(0.1)

    @rule()
    def kill(self) -> None:
        if self.world.daemon is not None:
            self.world.kill()

    @rule()
    def terminate(self) -> None:
        if self.world.daemon is not None:
            self.world.terminate()

    @rule(which=st.integers(0, 1))
    def sever(self, which: int) -> None:
        if len(self.world.network.connections) > which:
            self.world.network.sever(self.world.network.connections[which])

    def teardown(self) -> None:
        try:
            self.world.finish()
        finally:
            self.world.close()
            self.folder.cleanup()


def test_what_hypothesis_finds() -> None:
    """As above; a failure is shown by the fewest steps that lead to it."""
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=20, stateful_step_count=25, deadline=None, derandomize=True),
    )
