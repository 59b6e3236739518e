"""``python -m tests.chaos``: rounds of chaos, or restarts under load, and a verdict as exit code."""

import random
import shutil
import sys
import tempfile
from pathlib import Path

import click

from tests.chaos import report
from tests.chaos.disk import enter_namespace
from tests.chaos.plan import HARMLESS_TO_A_JOB, SLOW, Kind
from tests.chaos.rounds import Chaos
from tests.chaos.world import World


@click.command()
@click.option("--seed", type=int, help="Of all actions; drawn and printed when not given.")
@click.option("--replay", type=int, help="The seed of a run that failed: as --seed.")
@click.option("--rounds", default=100_000, help="At most so many.", show_default="no limit")
@click.option("--minutes", default=10.0, show_default=True, help="At most so long.")
@click.option(
    "--ranks", default=2, show_default=True, type=click.IntRange(2, 4), help="That survive."
)
@click.option(
    "--others", default=1, show_default=True, type=click.IntRange(1, 4), help="Of the second job."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([str(kind) for kind in Kind]),
    help="These actions alone.",
)
@click.option("--fast", is_flag=True, help="Without the actions that take seconds.")
@click.option("--ddp", is_flag=True, help="The survivors as a process group (gloo) under DDP.")
@click.option("--no-mount", is_flag=True, help="Plain directories, which nothing fills.")
@click.option(
    "--out",
    default=Path("chaos-results"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the results go, and the logs of a run that failed.",
)
def main(
    seed: int | None,
    replay: int | None,
    rounds: int,
    minutes: float,
    ranks: int,
    others: int,
    only: tuple[str, ...],
    fast: bool,
    ddp: bool,
    no_mount: bool,
    out: Path,
) -> None:
    """Train while daemon and ranks are killed, and check all that must hold.

    A replay does the same actions in the same order with the same delays; what they meet is a
    matter of timing, so a failure may take several tries to come again.
    """
    seed = next((s for s in (replay, seed) if s is not None), random.randrange(1 << 31))
    kinds = [Kind(name) for name in only] or list(Kind)
    if fast:
        kinds = [kind for kind in kinds if kind not in SLOW]
    if ddp:
        kinds = [kind for kind in kinds if kind in HARMLESS_TO_A_JOB]
    mount = not no_mount and enter_namespace()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        world = World(folder, ranks=ranks, others=others, mount=mount, distributed=ddp)
        mounted = all(disk.mounted for disk in world.disks)
        click.echo(f"seed {seed}; disks are {'ext4' if mounted else 'directories'}; {folder}")
        try:
            outcome = Chaos(world, seed, kinds, click.echo).run(rounds, minutes * 60)
        finally:
            world.close()
        settings = {"ranks": ranks, "others": others, "kinds": kinds, "ddp": ddp, "ext4": mounted}
        figures = report.results(outcome, world.counts, settings)
        report.write(out, figures)
        click.echo(report.page(figures))
        if outcome.failure:
            shutil.copytree(world.logs, out / f"logs-{seed}", dirs_exist_ok=True)
            click.echo(f"failed; again with: python -m tests.chaos --replay {seed}", err=True)
            sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
