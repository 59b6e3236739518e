"""Restart under load: SIGTERM, then a new daemon, as ``systemctl restart discod`` does it.

Each restart falls into a step of all ranks, at a moment drawn from a seed. The gradients are the
plain run's, no step raises, and no step waits for long after the new daemon is there.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.invariants import Broken, Invariants
from tests.chaos.plan import MOST_DELAY_MS
from tests.chaos.rank import PERIOD
from tests.chaos.world import World

CALM_STEPS = 2 * PERIOD
"""Without a restart: what a step takes otherwise."""
EXIT_SECONDS = 5.0
"""The drained exit's limit (``discod.server``), start of the process's end included."""
BEYOND_SECONDS = 5.0
"""Most that a step may take beyond its usual time and the daemon's absence. A client tries to come
back every 50 ms; what is left is the noise of a busy machine, where a lost wakeup would be 60 s."""


@dataclass(slots=True)
class Restarted:
    """Figures of a run; seconds.

    Attributes:
        calm_seconds: The median step without a restart.
        exit_seconds: From SIGTERM to the daemon's end.
        away_seconds: From SIGTERM until the next daemon was ready.
        lost_seconds: Of each step with a restart, by the slowest rank: beyond a calm one.
        beyond_seconds: The same without the daemon's absence.
    """

    seed: int
    restarts: int = 0
    steps: int = 0
    disk_bytes: int = 0
    calm_seconds: float = 0.0
    exit_seconds: list[float] = field(default_factory=list)
    away_seconds: list[float] = field(default_factory=list)
    lost_seconds: list[float] = field(default_factory=list)
    beyond_seconds: list[float] = field(default_factory=list)


def run(world: World, seed: int, restarts: int, say: Callable[[str], None]) -> Restarted:
    """So many restarts; raises :class:`Broken`, or what a step raised, at the first fault."""
    source = random.Random(seed)
    invariants = Invariants(world)
    figures = Restarted(seed)
    calm = []
    for _ in range(CALM_STEPS):
        _begin(world)
        calm.append(_finish(world, figures))
    figures.calm_seconds = statistics.median(calm[1:])
    invariants.learn()
    for number in range(1, restarts + 1):
        _begin(world)
        time.sleep(source.randint(0, MOST_DELAY_MS) / 1000)
        began = time.monotonic()
        world.the_daemon.terminate()
        code = world.the_daemon.wait(2 * EXIT_SECONDS)
        ended = time.monotonic()
        world.start_daemon()
        away = time.monotonic() - began
        lost = _finish(world, figures) - figures.calm_seconds
        figures.restarts = number
        figures.exit_seconds.append(ended - began)
        figures.away_seconds.append(away)
        figures.lost_seconds.append(lost)
        figures.beyond_seconds.append(lost - away)
        say(f"restart {number}: exit {ended - began:.2f} s, away {away:.2f} s, lost {lost:.2f} s")
        if code or ended - began > EXIT_SECONDS:
            raise Broken(f"restart {number}: exit code {code} after {ended - began:.1f} s")
        if lost - away > BEYOND_SECONDS:
            raise Broken(f"restart {number}: a step lost {lost:.1f} s, the daemon {away:.1f} s")
        world.settle()
        invariants.check(number)
    return figures


def results(figures: Restarted) -> dict[str, Any]:
    """All figures, and the median and the worst of each list."""
    lists = {name: value for name, value in asdict(figures).items() if isinstance(value, list)}
    return asdict(figures) | {
        f"{word}_{name}": function(values)
        for name, values in lists.items()
        for word, function in (("median", statistics.median), ("most", max))
    }


def page(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = "".join(
        f"| {what} | {found[f'median_{name}']:.2f} s | {found[f'most_{name}']:.2f} s |\n"
        for what, name in (
            ("SIGTERM to the daemon's end", "exit_seconds"),
            ("SIGTERM to the next one's readiness", "away_seconds"),
            ("a step's loss against a calm one", "lost_seconds"),
            ("the same without the daemon's absence", "beyond_seconds"),
        )
    )
    return (
        f"seed {found['seed']}: {found['restarts']} restarts, {found['steps']} steps, each "
        f"bit-equal; a calm step takes {found['calm_seconds']:.2f} s\n\n"
        f"| what | median | most |\n|---|---|---|\n{rows}"
    )


def _begin(world: World) -> None:
    for rank in world.survivors.ranks:
        rank.begin_step()


def _finish(world: World, figures: Restarted) -> float:
    """Seconds that the step took in the slowest rank."""
    slowest = 0.0
    figures.disk_bytes = 0
    for number, rank in enumerate(world.survivors.ranks):
        (step,) = rank.said()
        expected = world.survivors.expected[number][rank.step % PERIOD]
        if step["error"] or step["fingerprint"] != expected or step["live_blobs"]:
            raise Broken(f"{rank.name}: not what the plain run gave, {expected}: {step}")
        rank.step += 1
        figures.steps += 1
        figures.disk_bytes += step["written_bytes"] + step["read_bytes"]
        slowest = max(slowest, step["seconds"])
    return slowest
