"""``make bench-io`` in a tiny form, so that it cannot rot."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.benchmarks import io
from tests.benchmarks.reference import Fio


@pytest.mark.parametrize("with_fio", [True, False])
def test_benchmark_runs(with_fio: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the benchmark would break unseen, or stop checking what it moved."""
    if with_fio and Fio.version() is None:
        if os.environ.get("DISCOD_TEST_REQUIRE_ALL") == "1":
            pytest.fail("DISCOD_TEST_REQUIRE_ALL is set, and fio is not installed (package fio)")
        pytest.skip("fio is not installed (package fio)")
    if not with_fio:
        monkeypatch.setattr(Fio, "version", staticmethod(lambda: None))
    results_path = tmp_path / "results.json"
    arguments = ["--directory", str(tmp_path), "--json", str(results_path), "--rounds", "1"]
    arguments += ["--blobs", "1MiB", "--data", "32MiB", "--arena", "4MiB", "--fio-jobs", "2"]
    outcome = CliRunner().invoke(io.main, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert "over probe" in outcome.output
    assert ("fio is not installed (package fio)" in outcome.output) is not with_fio
    (size,) = json.loads(results_path.read_text())["sizes"]
    assert size["blobs"] == 32
    assert size["write"]["bytes_per_second"]["median"] > 0
    assert set(size["read"]["references"]) == ({"fio", "probe"} if with_fio else {"probe"})
    assert list(tmp_path.iterdir()) == [results_path]


def test_missed_goals_are_found() -> None:
    """Else a benchmark that misses its goal would say that it is met."""

    def direction(ratio: float, cpu: float) -> dict[str, object]:
        return {
            "references": {"probe": {"ratio": {"median": ratio}}},
            "daemon_cpu_seconds_per_gb": cpu,
        }

    def results(ratio: float, cpu: float, save: float) -> dict[str, object]:
        size = {
            "blob_bytes": io.GOAL_BLOB_BYTES,
            "write": direction(ratio, cpu),
            "read": direction(ratio, cpu),
            "calls_seconds": {"save": {"median": save}, "memcpy": {"median": 0.002}},
        }
        return {"sizes": [size]}

    assert [met for _, met in io.goals(results(0.9, 0.06, 0.0021))] == [True] * 5
    assert [met for _, met in io.goals(results(0.89, 0.061, 0.0022))] == [False] * 5
