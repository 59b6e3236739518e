"""``python -m disco_client [OPTIONS] SCRIPT [ARGS]...``: the command line of ``runner``.

click, as the daemon's command line has it: it stops at the script's name, whatever follows. It is
imported here alone, so that ``import disco_client`` costs no more.
"""

import importlib.util
import os
import sys

import click

from disco_client import runner
from discod.wire.sizes import parse_size


def _size(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from error
    return value


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--scratch",
    type=click.Path(),
    multiple=True,
    metavar="DIR",
    help="Start a daemon for this node with this directory on NVMe, unless one is running; "
    "once per device to stripe over.  [default: DISCOD_SCRATCH, else one must be running]",
)
@click.option(
    "--arena",
    callback=_size,
    metavar="SIZE",
    help="RAM of each process for what is kept.  "
    "[default: DISCOD_ARENA, else a share of the daemon's --ram]",
)
@click.option(
    "--min-bytes",
    callback=_size,
    metavar="SIZE",
    help="Smaller tensors stay in memory.  [default: DISCOD_MIN_BYTES, else 1MiB]",
)
@click.option(
    "--offload-all",
    is_flag=True,
    help="Everything that autograd saves goes to discod, not only the inputs of activation "
    "checkpoints: for models that do not recompute.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(**_: object) -> None:
    """Run a training SCRIPT, unchanged, with its activation checkpoints kept by discod.

    Every call of torch.utils.checkpoint in the process is covered, whichever library makes it; the
    gradients are the same to the bit. What stands after SCRIPT is the script's own. One line on
    stderr at the end says what was moved (DISCOD_SUMMARY=0: none).

    \b
    python -m disco_client --scratch /nvme train.py --lr 1e-4
    torchrun --nproc-per-node 8 -m disco_client --scratch /nvme train.py
    accelerate launch -m disco_client --scratch /nvme train.py
    """


def main() -> None:
    """Read the options, then leave click behind: nothing of it is around the script."""
    try:
        given = command.make_context("python -m disco_client", sys.argv[1:]).params
        found = importlib.util.find_spec if given["module"] else os.path.isfile
        if not found(given["script"]):
            kind = "module" if given["module"] else "file"
            raise click.UsageError(f"there is no {kind} {given['script']!r}")
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    runner.configure(given["scratch"], given["arena"], given["min_bytes"])
    runner.run(
        given["script"],
        given["args"],
        module=given["module"],
        everything=given["offload_all"],
    )


if __name__ == "__main__":
    main()
