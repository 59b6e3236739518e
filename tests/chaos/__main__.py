"""``python -m tests.chaos``: rounds of chaos, or restarts under load; exit code 1: it failed."""

import random
import shutil
import sys
import tempfile
from pathlib import Path

import click

from tests.chaos import report
from tests.chaos import restarts as restarting
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
@click.option(
    "--restarts", type=click.IntRange(1), help="Instead: so many restarts of the daemon under load."
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
    restarts: int | None,
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
    others = 0 if restarts else others
    try:
        world = World(folder, ranks=ranks, others=others, mount=mount, distributed=ddp)
        mounted = all(disk.mounted for disk in world.disks)
        click.echo(f"seed {seed}; disks are {'ext4' if mounted else 'directories'}; {folder}")
        try:
            if restarts:
                failure = _restart(world, seed, restarts, out)
            else:
                outcome = Chaos(world, seed, kinds, click.echo).run(rounds, minutes * 60)
                failure = outcome.failure
                settings = {"ranks": ranks, "others": others, "ddp": ddp, "ext4": mounted}
                figures = report.results(outcome, world.counts, settings | {"kinds": kinds})
                report.write(out, "chaos", figures, report.page(figures))
                click.echo(report.page(figures))
        finally:
            world.close()
        if failure:
            shutil.copytree(world.logs, out / f"logs-{seed}", dirs_exist_ok=True)
            click.echo(f"failed, and may again with --replay {seed}: {failure}", err=True)
            sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _restart(world: World, seed: int, count: int, out: Path) -> str:
    """Restarts under load; what failed, or nothing."""
    try:
        figures = restarting.results(restarting.run(world, seed, count, click.echo))
    except Exception as error:  # noqa: BLE001  whatever it is, the run failed and says why
        return f"{type(error).__name__}: {error}"
    report.write(out, "restarts", figures, restarting.page(figures))
    click.echo(restarting.page(figures))
    return ""


if __name__ == "__main__":
    main()
