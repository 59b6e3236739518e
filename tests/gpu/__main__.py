"""``python -m tests.gpu``: all parts, the table as it grows, and a verdict as exit code."""

import sys
import tempfile
import time
from pathlib import Path

import click

from tests.gpu import machine, report
from tests.gpu.runner import LIMITS_SECONDS, Plan, run

SECONDS = 290.0
"""For all parts; a rented GPU is paid for by the minute."""
CPU_JOBS = 2


@click.command()
@click.option(
    "--device", default="cuda", show_default=True, help="What to measure: cuda, cuda:1, cpu."
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
            parts=only or tuple(LIMITS_SECONDS),
            device=device,
            quick=quick,
            out=out.resolve(),
            scratch=Path(run_scratch).resolve(),
            sockets=Path(run_sockets).resolve(),
            seconds=seconds,
            jobs=1 if device.startswith("cuda") else CPU_JOBS,
        )
        lines = run(plan, lambda line: click.echo(report.text(line)))
    header["run"] = f"{time.monotonic() - began:.0f} s{', quick' if quick else ''}"
    report.write(out, header, lines)
    click.echo(f"{report.summary(lines)}; {header['run']}; see {out / 'results.md'}")
    sys.exit(0 if report.passed(lines) else 1)


if __name__ == "__main__":
    main()
