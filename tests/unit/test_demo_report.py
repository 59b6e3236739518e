"""The demo's verdict: equal only if every bit of every report is, and exit code 1 otherwise."""

from dataclasses import replace

import pytest
from rich.console import Console

from examples.demo.__main__ import arena_bytes, verdict
from examples.demo.messages import Offloaded, Settings, StepReport
from examples.demo.report import DaemonCost, differences, table

RANKS = 2
STEPS = 3
SETTINGS = Settings(
    layers=4,
    width=128,
    length=256,
    rows=2,
    threads=1,
    arena_bytes=3 << 18,
    socket_dir="/run/discod",
)


def report(step: int, rank: int, *, offloaded: bool) -> StepReport:
    """A plausible report; the same results whether offloaded or not."""
    return StepReport(
        rank=rank,
        step=step,
        loss=5.5 - step,
        gradients={"head": f"a{step}{rank}", "layers.0.out": f"b{step}{rank}"},
        parameters=f"p{step}",
        random_state=f"r{step}{rank}",
        seconds=2.5 if offloaded else 2.0,
        cpu_seconds=2.2 if offloaded else 2.0,
        peak_bytes=(600 if offloaded else 800) << 20,
        offloaded=Offloaded(192 << 20, 144 << 20, 48 << 20, 144 << 20, 0.25, 0.5)
        if offloaded
        else None,
    )


def job(*, offloaded: bool) -> list[list[StepReport]]:
    """All reports of one variant."""
    return [
        [report(step, rank, offloaded=offloaded) for rank in range(RANKS)] for step in range(STEPS)
    ]


def show(plain: list[list[StepReport]], discod: list[list[StepReport]]) -> str:
    """The table as text."""
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(SETTINGS, plain, discod, DaemonCost(0.5, 13 << 20)))
    return capture.get()


def test_equal_reports_pass() -> None:
    """Else the demo would fail with everything right."""
    plain, discod = job(offloaded=False), job(offloaded=True)
    assert differences(plain, discod) == []
    assert verdict(plain, discod) == 0
    text = show(plain, discod)
    assert "12 of 12 tensors" in text
    assert "1.25 times" in text
    assert "1.10 times" in text
    assert "200.0 MiB freed" in text
    assert "230.4 MiB/s" in text  # 2 ranks of 288 MiB in 2.5 s


@pytest.mark.parametrize("name", ["loss", "gradients", "parameters", "random_state"])
@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("rank", range(RANKS))
def test_any_difference_is_exit_code_1(
    name: str, step: int, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else wrong gradients could pass as equal, which is all that the demo is about."""
    plain, discod = job(offloaded=False), job(offloaded=True)
    other = {
        "loss": 5.5000001,
        "gradients": {"head": "another", "layers.0.out": f"b{step}{rank}"},
        "parameters": "another",
        "random_state": "another",
    }[name]
    discod[step][rank] = replace(discod[step][rank], **{name: other})
    assert verdict(plain, discod) == 1
    assert f"step {step + 1}, rank {rank}" in capsys.readouterr().err
    assert " no " in show(plain, discod)


def test_a_missing_gradient_is_a_difference() -> None:
    """Else a parameter that got no gradient at all under discod would not be noticed."""
    plain, discod = job(offloaded=False), job(offloaded=True)
    discod[1][0].gradients.pop("head")
    assert differences(plain, discod) == ["step 2, rank 0: gradient of head"]


def test_a_missing_report_is_an_error() -> None:
    """Else a rank that reported nothing would count as equal."""
    with pytest.raises(ValueError, match="shorter"):
        differences(job(offloaded=False), job(offloaded=True)[:-1])


def test_the_arena_always_has_room_to_work() -> None:
    """Else ``--arena 0`` or few layers would ask for an arena that no layer fits into."""
    assert arena_bytes(0.25, 12, 16 << 20) == 48 << 20
    assert arena_bytes(0.0, 12, 16 << 20) == 48 << 20
    assert arena_bytes(0.25, 4, 1 << 20) == 3 << 20
