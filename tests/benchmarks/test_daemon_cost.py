"""``python -m tests.benchmarks.daemon_cost`` in a tiny form, so that it cannot rot."""

from pathlib import Path

from click.testing import CliRunner

from tests.benchmarks import daemon_cost


def test_benchmark_runs(tmp_path: Path) -> None:
    """Else it would break unseen, or measure the same daemon twice, or not check the bytes."""
    arguments = ["--directory", str(tmp_path), "--rounds", "1", "--blobs", "64KiB,1MiB"]
    arguments += ["--data", "16MiB", "--arena", "4MiB", "--against", str(Path(__file__).parents[2])]
    outcome = CliRunner().invoke(daemon_cost.main, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert "this: CPU-s/GB" in outcome.output
    assert "other: CPU-s/GB" in outcome.output
    assert list(tmp_path.iterdir()) == []
