"""The GIL benchmark in a tiny form, so that it cannot rot."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.benchmarks.frame import WrongBytes
from tests.benchmarks.gil import DISCOD, GOAL_WORK, Gil, Plan, measure
from tests.benchmarks.offloader import FULL, WORK, Load, Probed, Settings, work
from tests.benchmarks.systems import AXOLOTL

BLOB_BYTES = 1 << 20


def test_benchmark_runs_and_is_judged(tmp_path: Path) -> None:
    """Else it would break unseen, or say that a goal is met that is not."""
    plan = Plan([DISCOD], rounds=1, window_seconds=0.02, blob_bytes=BLOB_BYTES, blobs=8)
    result = json.loads(json.dumps(measure(plan, tmp_path) | {"missing": {AXOLOTL: "absent"}}))
    assert list(tmp_path.iterdir()) == []
    page = Gil().markdown(result)
    assert f"{AXOLOTL} could not be run: absent." in page
    assert page.count(f"| {DISCOD} |") == 3
    (plot,) = Gil().plots(result)
    assert list(plot.series) == [DISCOD]

    def met(ratio: float) -> bool | None:
        changed = copy.deepcopy(result)
        before, loaded, after = changed["rounds"][0][DISCOD][FULL][WORK]
        before["units_per_second"], after["units_per_second"] = 90.0, 110.0
        loaded["units_per_second"] = 100.0 * ratio
        (goal,) = Gil().goals(changed)
        return goal.met

    assert met(GOAL_WORK)
    assert not met(GOAL_WORK - 0.01)


class Memory:
    """A manager that keeps copies."""

    def __init__(self, spoil: Callable[[torch.Tensor], object]) -> None:
        self._spoil = spoil

    def save_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        self._spoil(copied)
        return copied

    def load_tensor(self, handle: torch.Tensor) -> torch.Tensor:
        return handle

    def cleanup_tensor(self, handle: torch.Tensor) -> None:
        """Nothing is left."""


def load(spoil: Callable[[torch.Tensor], object]) -> Load:
    settings = Settings(
        system=DISCOD,
        blob_bytes=4096,
        blobs=2,
        arena_bytes=0,
        socket_dir="",
        folder="",
        paced_bytes_per_second=1.0,
    )
    return Load(settings, Memory(spoil))


def test_load_moves_bytes_beside_the_probe() -> None:
    """Else "full rate" could be an idle thread, and the figures those of an idle process."""
    seen = load(lambda tensor: None).run(lambda: work(0.05), None)
    assert seen.bytes_per_second > 0
    assert seen.units_per_second > 0
    assert seen.late_p50_seconds <= seen.late_p99_seconds <= seen.late_worst_seconds


def test_wrong_bytes_are_found() -> None:
    """Else a system that loses data could win."""

    def probe() -> Probed:
        return Probed(late=[0.0], seconds=1.0)

    with pytest.raises(WrongBytes, match="came back as 7"):
        load(lambda tensor: tensor.fill_(7)).run(probe, None)
