"""The training benchmark in a tiny form, so that it cannot rot."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks import axolotl_disco, legs
from tests.benchmarks.frame import RunOptions, WrongBytes
from tests.benchmarks.legs import Leg
from tests.benchmarks.page_cache import cached_bytes
from tests.benchmarks.systems import (
    AXOLOTL,
    DISCOD,
    PLAIN,
    REENTRANT,
    REFERENCE,
    SAVE_ON_CPU,
    Attachment,
    open_system,
)
from tests.benchmarks.trainer import StepReport, fingerprint
from tests.benchmarks.training import FULL, GOAL_RATIOS, QUICK, WORKLOADS, Training
from tests.benchmarks.workers import Worker, WorkerFailed, answers
from tests.benchmarks.workloads import Workload, make_batch, make_model

TINY = Workload(layers=8, hidden_bytes=2 << 20, width=64, inner=8, threads=1)
OVERFLOW_BYTES = 5 * TINY.hidden_bytes


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One leg of one round, as read from JSON."""
    folder = tmp_path_factory.mktemp("bench")
    leg = Leg("I/O-heavy", 0.3, "warm", (PLAIN, DISCOD), rounds=1, steps=1)
    found = Training().run_legs([leg], {"I/O-heavy": TINY}, RunOptions(folder), lambda text: None)
    assert list(folder.iterdir()) == []
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def test_leg_runs(result: dict[str, Any]) -> None:
    """Else the benchmark would break unseen, or its figures would not be those of the systems."""
    (leg,) = result["legs"]
    ours = leg["systems"][DISCOD]
    assert leg["arena_bytes"] == 3 * TINY.hidden_bytes
    assert ours["saved_bytes"] == TINY.activation_bytes
    assert ours["overflow_bytes"] == ours["written_bytes"] == ours["read_bytes"] == OVERFLOW_BYTES
    assert ours["ratios"] == [ours["seconds"][0] / leg["systems"][PLAIN]["seconds"][0]]
    assert ours["peak_bytes"] > leg["arena_bytes"]
    assert "10.0 MiB / 10.0 MiB" in Training().markdown(result)


def test_goals_are_judged(result: dict[str, Any]) -> None:
    """Else a benchmark that misses its goals would say that they are met."""
    changed = copy.deepcopy(result)
    systems = changed["legs"][0]["systems"]
    systems[DISCOD]["ratios"] = [GOAL_RATIOS["I/O-heavy"]]
    systems["discod Disco"] = copy.deepcopy(systems[DISCOD])
    systems["discod Disco"]["ratios"] = [GOAL_RATIOS["I/O-heavy"] + 0.01]
    systems[AXOLOTL] = copy.deepcopy(systems[PLAIN])
    systems[AXOLOTL]["peak_bytes"] = systems[DISCOD]["peak_bytes"] + 1
    systems["discod Disco"]["peak_bytes"] += 1
    changed["legs"].append(copy.deepcopy(changed["legs"][0]))
    changed["legs"][1]["leg"]["malloc"] = "default"
    systems["discod Disco"]["written_bytes"] = OVERFLOW_BYTES * 1.03
    goals = Training().goals(changed)
    assert [goal.met for goal in goals] == [True, False, *[None] * 6, True, False, False]


def test_plot_has_a_point_for_each_arena(result: dict[str, Any]) -> None:
    """Else the curve over the arena's size would miss some, or put them at the wrong place."""
    legs = []
    for share in (0.5, 0.1):
        leg = copy.deepcopy(result["legs"][0])
        leg["leg"]["share"] = share
        leg["systems"][DISCOD]["ratios"] = [1 + share, 2.0, 1.0]
        leg["systems"]["discod Disco"] = leg["systems"][DISCOD]
        legs.append(leg)
    (plot,) = Training().plots({"missing": {}, "legs": legs})
    points = [(10.0, 1.1), (50.0, 1.5)]
    assert plot.series == {DISCOD: points, "discod Disco": points}
    assert Training().plots(result) == []


def test_every_leg_has_its_references() -> None:
    """Else a leg would run for minutes, and then fail for want of what it is compared with."""
    for leg in (*QUICK, *FULL):
        assert {REFERENCE[system] for system in leg.systems} <= set(leg.systems)
        assert leg.workload in WORKLOADS
    assert AXOLOTL not in FULL[2].without([AXOLOTL]).systems


def report(step: int, gradients: str) -> StepReport:
    return StepReport(step, 1.0, 1.0, 0.5, gradients, 1, None, {"written_bytes": 4}, {})


def run_of(*gradients: str) -> Any:
    reports = [[report(step, text)] for step, text in enumerate(gradients)]
    return SimpleNamespace(reports=reports, job=SimpleNamespace(system=PLAIN))


def test_wrong_gradients_are_found() -> None:
    """Else a system that trains wrongly, at whatever step, would be measured as if it did not."""
    legs.check_gradients({PLAIN: run_of("a", "b"), DISCOD: run_of("a", "b")})
    with pytest.raises(WrongBytes, match="step 1"):
        legs.check_gradients({PLAIN: run_of("a", "b"), DISCOD: run_of("a", "c")})


def test_wrong_counts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else bytes written could be claimed that the daemon never wrote, or kept quiet about."""
    client = {"written_bytes": 4, "read_bytes": 0}
    daemon: Any = SimpleNamespace(status=lambda: {"clients": [client]})
    run = run_of("a")
    run.reports[-1] = [replace(report(0, "a"), totals=dict(client))]
    legs.check_daemon({DISCOD: run}, daemon)
    client["written_bytes"] = 5
    with pytest.raises(WrongBytes, match="written_bytes: 5"):
        legs.check_daemon({DISCOD: run}, daemon)


def gradients_of(system: str, folder: Path) -> str:
    small = Workload(layers=2, hidden_bytes=32 << 10, width=32, inner=8)
    model = make_model(small, open_system(system, Attachment(folder=str(folder))))
    model(make_batch(small, 0)).backward()
    return fingerprint(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("system", [REENTRANT, SAVE_ON_CPU])
def test_plain_systems_train_alike(system: str, tmp_path: Path) -> None:
    """Else discod would be compared with something that does other work."""
    assert gradients_of(system, tmp_path) == gradients_of(PLAIN, tmp_path)


# One of its prefetching threads ends with an error when it is closed at the wrong moment.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_axolotl_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the peer's figures would be missing, or those of something that does not work."""
    try:
        path = axolotl_disco.find()
    except axolotl_disco.NotInstalled as error:
        pytest.skip(str(error))
    module = axolotl_disco.load(path, tmp_path)
    manager = module.Disco.get_instance()
    monkeypatch.setattr(axolotl_disco, "load", lambda path, folder: module)
    try:
        assert gradients_of(AXOLOTL, tmp_path) == gradients_of(REENTRANT, tmp_path)
        assert manager.idx == 2
        assert Path(manager.temp_dir).parent == tmp_path
    finally:
        manager.cleanup()


def test_fingerprint_sees_one_bit() -> None:
    """Else different gradients could pass as equal."""
    assert fingerprint([torch.tensor([0.0])]) != fingerprint([torch.tensor([-0.0])])
    with pytest.raises(ValueError, match="parameter 1"):
        fingerprint([torch.zeros(1), None])


def test_page_cache_is_counted(tmp_path: Path) -> None:
    """Else Axolotl's memory would be stated without most of it."""
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "file").write_bytes(bytes(1 << 20))
    found = cached_bytes(tmp_path)
    if found is None:
        pytest.skip("this kernel has no cachestat(2), which Linux 6.5 brought")
    assert found == 1 << 20


def test_worker_that_ends_is_named(tmp_path: Path) -> None:
    """Else a rank's failure would be a hang, or an error that does not say what happened."""
    worker = Worker("tests.benchmarks.no_such_module", "{}", tmp_path / "log")
    try:
        with pytest.raises(WorkerFailed, match=r"no_such_module \d+: it ended\n.*No module named"):
            answers([worker], 60)
    finally:
        worker.kill()
