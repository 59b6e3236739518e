"""``python -m tests.gpu``: all parts, the table as it grows, and a verdict as exit code."""

import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import click

from tests.gpu import machine, report
from tests.gpu.runner import LIMITS_SECONDS, Line, Plan, run

SECONDS = 290.0
"""For all parts; a rented GPU is paid for by the minute."""
CPU_JOBS = 2


class Interrupted(BaseException):
    """A signal asked for the end; its number is the argument."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal; a second one ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(number)


def known_device(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """``value``, if it is the name of a device."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise click.BadParameter(f"{value!r} is none of cpu, cuda and cuda:N")
    return value


@click.command()
@click.option(
    "--device",
    default="cuda",
    show_default=True,
    callback=known_device,
    help="What to measure: cuda, cuda:1, cpu.",
)
@click.option("--quick", is_flag=True, help="A tiny form, to see that the script works.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(LIMITS_SECONDS)),
    help="This part alone; may be given several times.",
)
@click.option(
    "--out",
    default=Path("gpu-results"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the results, the plot and the logs go.",
)
@click.option(
    "--scratch",
    default=Path(),
    show_default="the working directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="On the disk to use; all files in it are temporary.",
)
@click.option("--seconds", default=SECONDS, show_default=True, help="For all parts together.")
def main(
    device: str, quick: bool, only: tuple[str, ...], out: Path, scratch: Path, seconds: float
) -> None:
    """Check and measure discod on a GPU."""
    if why := machine.unusable(device):
        raise click.UsageError(f"{why}. Without a GPU there is only: --device cpu --quick")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    try:
        ok = measure(device, quick, only or tuple(LIMITS_SECONDS), out, scratch, seconds)
    except Interrupted as interrupted:
        click.echo(f"interrupted; what there is, is in {out}")
        sys.exit(128 + int(interrupted.args[0]))
    sys.exit(0 if ok else 1)


def measure(
    device: str, quick: bool, parts: tuple[str, ...], out: Path, scratch: Path, seconds: float
) -> bool:
    """Run ``parts``, with results as they come; whether all of them passed."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="discod-gpu-", dir=scratch) as run_scratch,
        tempfile.TemporaryDirectory(prefix="discod-gpu-") as run_sockets,
    ):
        header = machine.describe(device, Path(run_scratch), (32 if quick else 512) << 20)
        for name, value in header.items():
            click.echo(f"{name}: {value}")
        plan = Plan(
            parts=parts,
            device=device,
            quick=quick,
            out=out.resolve(),
            scratch=Path(run_scratch).resolve(),
            sockets=Path(run_sockets).resolve(),
            seconds=seconds,
            jobs=1 if device.startswith("cuda") else CPU_JOBS,
        )

        def save(rows: list[Line], complete: bool = False) -> None:
            took = f"{time.monotonic() - began:.0f} s{', quick' if quick else ''}"
            header["run"] = took if complete else f"{took}, not complete"
            report.write(out, header, rows, complete)

        lines = run(plan, lambda line: click.echo(report.text(line)), save)
        save(lines, complete=True)
    click.echo(f"{report.summary(lines)}; {header['run']}; see {out / 'results.md'}")
    return report.passed(lines)


if __name__ == "__main__":
    main()
