"""Whether both variants computed the same bits, and the table of what each cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median

from rich.table import Table

from discod.wire.sizes import format_size
from examples.demo.messages import Offloaded, Settings, StepReport

Steps = Sequence[Sequence[StepReport]]
"""All reports of one variant: by step, then by rank."""


@dataclass(frozen=True, slots=True)
class DaemonCost:
    """What the daemon took for its part in all steps."""

    cpu_seconds: float
    memory_bytes: int


def differences(plain: Steps, discod: Steps) -> list[str]:
    """Where the variants' results are not equal bit for bit, in words; empty if nowhere."""
    found = []
    for one, other in zip(
        (report for step in plain for report in step),
        (report for step in discod for report in step),
        strict=True,
    ):
        where = f"step {one.step + 1}, rank {one.rank}"
        if (one.step, one.rank) != (other.step, other.rank):
            raise ValueError(f"{where} compared with step {other.step + 1}, rank {other.rank}")
        found += [
            f"{where}: gradient of {name}"
            for name in sorted(one.gradients.keys() | other.gradients.keys())
            if one.gradients.get(name) != other.gradients.get(name)
        ]
        found += [
            f"{where}: {name.replace('_', ' ')}"
            for name in ("loss", "parameters", "random_state")
            if getattr(one, name) != getattr(other, name)
        ]
    return found


def table(settings: Settings, plain: Steps, discod: Steps, daemon: DaemonCost) -> Table:
    """What a person wants to know. The first step warms up, and counts for equality alone."""
    different = differences(plain, discod)
    result = Table(title="Plain checkpointing and discod", title_justify="left")
    result.add_column()
    result.add_column("plain", justify="right")
    result.add_column("discod", justify="right")
    result.add_column()

    reports = [report for step in discod for report in step]
    tensors = sum(len(report.gradients) for report in reports)
    gradients = [text for text in different if "gradient" in text]
    others = [text for text in different if "gradient" not in text]
    losses = (f"{_loss(steps[0])} to {_loss(steps[-1])}" for steps in (plain, discod))
    result.add_row("loss, first to last step", *losses, "differs" if others else "equal")
    result.add_row(
        "gradients bit-equal",
        "",
        "no" if gradients else "yes",
        f"{tensors - len(gradients)} of {tensors} tensors",
    )
    result.add_row("weights, RNG state bit-equal", "", "no" if others else "yes", "after each step")

    seconds = [_of_steps(steps, lambda r: r.seconds) for steps in (plain, discod)]
    cpu_seconds = [_of_steps(steps, lambda r: r.cpu_seconds) for steps in (plain, discod)]
    result.add_section()
    for name, (before, after) in (
        ("step time, median", seconds),
        ("  of it CPU time of a trainer", cpu_seconds),
    ):
        result.add_row(name, f"{before:.2f} s", f"{after:.2f} s", f"{after / before:.2f} times")
    peaks = [max(r.peak_bytes for step in steps[1:] for r in step) for steps in (plain, discod)]
    freed = peaks[0] - peaks[1]
    result.add_row(
        "peak memory of a trainer",
        *map(format_size, peaks),
        f"{format_size(freed)} freed" if freed >= 0 else f"{format_size(-freed)} more",
    )
    result.add_row(
        "  for layer inputs",
        format_size(settings.activation_bytes),
        format_size(settings.arena_bytes),
        "all of the arena counts",
    )

    traffic = _traffic(discod)
    result.add_section()
    result.add_row("per step and rank:", "", "", "")
    for field, note in (
        ("saved_bytes", "by forward"),
        ("written_bytes", "to the disk"),
        ("elided_bytes", "never needed the disk"),
        ("read_bytes", "by backward, ahead of use"),
    ):
        name = field.removesuffix("_bytes")
        result.add_row(f"  {name}", "", format_size(getattr(traffic, field)), note)
    waited = traffic.save_wait_seconds, traffic.load_wait_seconds
    result.add_row("  waited for room, for reads", "", f"{waited[0]:.2f} s, {waited[1]:.2f} s", "")

    moved = len(discod[0]) * (traffic.written_bytes + traffic.read_bytes)
    total = sum(r.offloaded.written_bytes + r.offloaded.read_bytes for r in reports if r.offloaded)
    result.add_section()
    result.add_row(
        "disk rate over the step", "", f"{format_size(moved / seconds[1])}/s", "all ranks"
    )
    result.add_row(
        "daemon",
        "",
        f"{daemon.cpu_seconds / (total / 1e9 or 1):.3f} CPU-s/GB",
        f"{format_size(daemon.memory_bytes)} beside the arenas",
    )
    return result


def _loss(step: Sequence[StepReport]) -> str:
    return f"{sum(report.loss for report in step) / len(step):.4f}"


def _of_steps(steps: Steps, seconds: Callable[[StepReport], float]) -> float:
    """The median over steps, of the slowest rank of each."""
    return median(max(seconds(report) for report in step) for step in steps[1:])


def _traffic(steps: Steps) -> Offloaded:
    """The mean over steps and ranks."""
    reports = [r.offloaded for step in steps[1:] for r in step if r.offloaded is not None]
    return Offloaded(
        *(
            sum(getattr(report, field.name) for report in reports) / len(reports)
            for field in fields(Offloaded)
        )
    )
