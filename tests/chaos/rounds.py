"""Rounds of chaos: a step of all ranks, what the adversary does meanwhile, and all invariants."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.adversary import Adversary
from tests.chaos.invariants import Broken, Invariants
from tests.chaos.plan import ERRORS, Action, Kind, draw
from tests.chaos.rank import PERIOD
from tests.chaos.ranks import Job, Rank
from tests.chaos.world import World

MOST_TRIES = 3
"""Of a step that raised what it may; by then nothing fails any more."""


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        rounds: That held all invariants.
        failure: What did not hold, in which round; empty when all did.
        steps: That ranks completed, each bit-equal.
        disk_bytes: Read and written by those steps.
        leaked_bytes: Left in accounts and on disks when all ranks were gone.
        slopes: Bytes a round by which own memory grew.
    """

    seed: int
    rounds: int = 0
    failure: str = ""
    actions: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    disk_bytes: int = 0
    seconds: float = 0.0
    leaked_bytes: int = 0
    resumes: int = 0
    slopes: dict[str, float] = field(default_factory=dict)


class Chaos:
    """A run.

    Args:
        world: In which.
        seed: Of all actions.
        kinds: Which the adversary may do.
        say: Gets a line for each round.
    """

    def __init__(
        self, world: World, seed: int, kinds: Sequence[Kind], say: Callable[[str], None]
    ) -> None:
        self._world = world
        self._kinds = kinds
        self._say = say
        self._adversary = Adversary(world)
        self._invariants = Invariants(world)
        self._traffic: dict[int, int] = {}
        self.outcome = Outcome(seed)

    def run(self, rounds: int, seconds: float) -> Outcome:
        """So many rounds, or until the time is up, or something does not hold."""
        outcome = self.outcome
        started = time.monotonic()
        try:
            self._round(0, [])
            self._invariants.learn()
            while outcome.rounds < rounds and time.monotonic() - started < seconds:
                number = outcome.rounds + 1
                actions = draw(outcome.seed, number, self._kinds)
                self._say(f"round {number}: {', '.join(map(str, actions))}")
                begun = time.monotonic()
                try:
                    self._round(number, actions)
                    self._invariants.check(number)
                except Exception as error:
                    error.add_note(
                        f"seed {outcome.seed}, round {number}: {', '.join(map(str, actions))}"
                    )
                    raise
                outcome.rounds = number
                for action in actions:
                    outcome.actions[action.kind] = outcome.actions.get(action.kind, 0) + 1
                self._say(f"round {number}: all holds, {time.monotonic() - begun:.1f} s")
            outcome.slopes = self._invariants.check_flat()
            self._end()
        except Exception as error:  # noqa: BLE001  whatever it is, the run failed and says why
            notes = getattr(error, "__notes__", [])
            outcome.failure = "; ".join([f"{type(error).__name__}: {error}", *notes])
        outcome.seconds = time.monotonic() - started
        log = self._world.daemon_log.read_text()
        outcome.resumes = log.count(" resumed, arena ")
        return outcome

    def _round(self, number: int, actions: Sequence[Action]) -> None:
        jobs = (self._world.survivors, self._world.victims)
        allowed = set[str]().union(*(ERRORS.get(action.kind, set()) for action in actions))
        for job in jobs:
            for rank in job.ranks:
                rank.begin_step()
        for action in actions:
            self._adversary.act(action)
        self._world.heal()
        for job in jobs:
            for index in range(len(job.ranks)):
                self._complete(job, index, allowed)
        self._world.settle()

    def _complete(self, job: Job, index: int, allowed: set[str]) -> None:
        """Until the rank in this place has completed the step, rightly."""
        for _ in range(MOST_TRIES):
            rank = job.ranks[index]
            said = rank.said()
            if any(message["said"] == "closed" for message in said):
                rank.close()
                job.ranks[index] = rank = self._world.make_rank(job, index)
                rank.begin_step()
                said = rank.said()
            self._world.counts.errors.update(f"attach: {name}" for name in rank.attach_errors)
            rank.attach_errors.clear()
            if self._judge(job, index, rank, said[-1], allowed):
                return
            rank.begin_step()
        raise Broken(f"{rank.name}: step {rank.step} still fails: {said[-1]}")

    def _judge(
        self, job: Job, index: int, rank: Rank, step: dict[str, Any], allowed: set[str]
    ) -> bool:
        if step["live_blobs"]:
            raise Broken(f"{rank.name} keeps blobs after its step: {step}")
        traffic = step["written_bytes"] + step["read_bytes"]
        self.outcome.disk_bytes += traffic - self._traffic.get(rank.pid, 0)
        self._traffic[rank.pid] = traffic
        if step["error"]:
            self._world.counts.errors[f"step: {step['error']}"] += 1
            if step["error"] not in allowed:
                raise Broken(f"{rank.name}: a step raised what it must not: {step}")
            self._world.counts.retried_steps += 1
            return False
        expected = job.expected[index][rank.step % PERIOD]
        if step["step"] != rank.step or step["fingerprint"] != expected:
            raise Broken(f"{rank.name}: gradients are not the plain run's, {expected}: {step}")
        rank.step += 1
        self.outcome.steps += 1
        return True

    def _end(self) -> None:
        for rank in self._world.all_ranks:
            rank.tell("close")
        for rank in self._world.all_ranks:
            rank.said()
            rank.close()
        self._world.survivors.ranks, self._world.victims.ranks = [], []
        self.outcome.leaked_bytes = self._invariants.check_empty()
        if self.outcome.leaked_bytes:
            raise Broken(f"{self.outcome.leaked_bytes} bytes are left when all ranks are gone")
