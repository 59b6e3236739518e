"""The benchmarks in a tiny form, so that they cannot rot: real code, real daemons, little data."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import disco_client
from tests.benchmarks import __main__ as command
from tests.benchmarks import calls, cycles, engines, io, page, peers, policy, scale, start
from tests.benchmarks.frame import Goal, Plot, Progress, RunOptions, WrongBytes, run_all
from tests.benchmarks.io import Io
from tests.benchmarks.reference import Fio, Probe
from tests.benchmarks.scale import Scale
from tests.benchmarks.suite import BENCHMARKS
from tests.helpers.jobs import ROOT
from tests.simulation.traces import all_traces

MIB = 1 << 20
PAGE = ROOT / "docs" / "benchmarks.md"


def silent(text: str) -> None:
    """Progress that nobody sees."""


def through_json(result: dict[str, Any]) -> dict[str, Any]:
    again: dict[str, Any] = json.loads(json.dumps(result))
    return again


def test_io(tmp_path: Path) -> None:
    """It would break unseen, stop checking what it moved, or leave its files."""
    case = io.Case(MIB, ranks=1, data_bytes=64 * MIB, rounds=1)
    result = through_json(io.measure([case], tmp_path, silent, with_engines=False))
    assert list(tmp_path.iterdir()) == []
    (row,) = result["cases"]
    references = {"fio", "probe"} if peers.fio() else {"probe"}
    for direction in io.DIRECTIONS:
        assert set(row[direction]["ratio"]) == references
        assert row[direction]["rate"]["median"] > 0
        assert row[direction]["daemon_cpu"]["median"] > 0
    assert "| 1.0 MiB |" in Io().markdown(result)
    assert {plot.name for plot in Io().plots(result)} == {"io-rate", "io-cpu"}


def test_goals_of_io_are_judged() -> None:
    """A benchmark that misses its goal would say that it is met."""

    def result(ratio: float, cpu: float) -> dict[str, Any]:
        part = {
            "ratio": {name: {"median": ratio} for name in ("fio", "probe")},
            "daemon_cpu": {"median": cpu},
        }
        row = {"blob_bytes": 16 * MIB, "ranks": 1, "checksum": "sampled"}
        far = {"blob_bytes": MIB, "ranks": 8, "checksum": "full", "write": {}, "read": {}}
        return {"cases": [row | {"write": part, "read": part}, far]}

    assert [goal.met for goal in Io().goals(result(0.97, 0.04))] == [True] * 6
    assert [goal.met for goal in Io().goals(result(0.96, 0.041))] == [False] * 6


def test_references_move_the_whole_file(tmp_path: Path) -> None:
    """A ratio to a reference that moves less than it says would flatter discod, or harm it."""
    probe = Probe(tmp_path / "probe", 32 * MIB)
    assert all(probe.run(direction) > 0 for direction in io.DIRECTIONS)
    probe.close()
    if peers.fio():
        fio = Fio(tmp_path / "fio", 64 * MIB)
        assert set(fio.forms) == set(io.DIRECTIONS)
        assert all(fio.run(direction) > 0 for direction in io.DIRECTIONS)


def test_calls(tmp_path: Path) -> None:
    """It would break unseen, or take a hit for a miss."""
    result = through_json(calls.measure([64 << 10], 8, tmp_path, silent))
    assert list(tmp_path.iterdir()) == []
    (row,) = result["sizes"]
    for form in ("paced", "tight"):
        assert row[form]["memcpy"]["median"] > 0
        assert row[form]["save"]["median"] > 0
    assert row["miss"]["load"]["median"] > 0
    assert "64.0 KiB" in calls.Calls().markdown(result)
    assert len(calls.Calls().goals(result)) == 4
    assert len(calls.Calls().plots(result)) == 1


def test_scale(tmp_path: Path) -> None:
    """It would break unseen."""
    result = through_json(scale.measure((1, 2), 64 * MIB, 1, 4, tmp_path, silent, (8,)))
    assert list(tmp_path.iterdir()) == []
    assert [row["count"] for row in result["ranks"]] == [1, 2]
    assert result["blocked"]["latency"]["median"] > 0
    assert result["blocked"]["reads"] >= 4
    assert len(Scale().goals(result)) == 5
    assert "| read ahead | 8 |" in Scale().markdown(result)


def test_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would break unseen, or praise a policy that writes too much."""
    wanted = ("plain", "plain, all fits")
    traces = [trace for trace in all_traces() if trace.name in wanted]
    monkeypatch.setattr(policy, "all_traces", lambda: traces)
    result = through_json(policy.Policy().run(RunOptions(tmp_path, full=True), silent))
    assert [goal.met for goal in policy.Policy().goals(result)] == [True] * 3
    assert "| plain, all fits | " in policy.Policy().markdown(result)
    for row in result["rows"]:
        row["steady"]["written_over_least"] = 1.03
        row["first"]["written_bytes"] *= 2 if row["policy"] == "discod" else 1
    assert [goal.met for goal in policy.Policy().goals(result)] == [False, True, False]


def test_start(tmp_path: Path) -> None:
    """It would break unseen."""
    result = through_json(start.measure(1, tmp_path, silent))
    assert result["resident_bytes"]["median"] > 1e6
    assert result["daemon_start"]["median"] > 0
    assert [goal.met is None for goal in start.Start().goals(result)] == [False, False]
    assert "import disco_client" in start.Start().markdown(result)


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark of a system that loses data would praise its speed."""

    class Lossy:
        def __init__(self, **options: int) -> None:
            self.saved = 0

        def save_tensor(self, tensor: torch.Tensor) -> int:
            self.saved += 1
            return self.saved

        def load_tensor(self, handle: int) -> torch.Tensor:
            return torch.zeros(4, dtype=torch.int64)

        def cleanup_tensor(self, handle: int) -> None:
            """Nothing is kept."""

        def wait_for_save(self, handle: int) -> None:
            """Nothing is written."""

    monkeypatch.setattr(disco_client, "DiskOffloadManager", Lossy)
    lossy = cycles.Cycles(4096, 2)
    lossy.write()
    with pytest.raises(WrongBytes, match="came back as 0"):
        lossy.read()


class Fake:
    """A benchmark that moves nothing."""

    name = "fake"
    title = "Fake"

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def run(self, options: RunOptions, progress: Progress) -> dict[str, Any]:
        progress("at work")
        if self._error is not None:
            raise self._error
        return {"figure": 1.0}

    def goals(self, result: dict[str, Any]) -> list[Goal]:
        met = result["figure"] > 1
        return [Goal("more than 1", f"{result['figure']}", met), Goal("?", "-", None)]

    def markdown(self, result: dict[str, Any]) -> str:
        return page.table(["what"], [[f"{result['figure']}"]])

    def plots(self, result: dict[str, Any]) -> list[Plot]:
        return []


class Broken(Fake):
    """One that fails."""

    name = "broken"
    title = "Broken"


def test_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    """Half an hour of measuring would be lost, or the failure would not be seen."""
    told: list[str] = []
    both = [Broken(WrongBytes("7 bytes came back")), Fake()]
    report = run_all(both, RunOptions(tmp_path), tmp_path / "out", told.append)
    assert report.ran == ["fake"]
    assert report.failed == {"broken": "WrongBytes: 7 bytes came back"}
    assert told == ["broken: at work", "fake: at work"]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "fake.md").write_text("The obstacle is that it is fake.\n")
    text = page.make(both, tmp_path / "out", notes)
    assert "Not run: `python -m tests.benchmarks broken`" in text
    assert "- **Missed:** more than 1: 1.0." in text
    assert "| fake | ? | - | not shown by this run |" in text
    assert "The obstacle is that it is fake." in text
    assert f"torch {torch.__version__}" in text


def test_the_page_is_what_its_files_say() -> None:
    """A figure in the documentation would be one that nobody measured."""
    folder = PAGE.with_suffix("")
    assert PAGE.read_text() == page.make(BENCHMARKS, folder, command.NOTES)
    for benchmark in BENCHMARKS:
        assert (folder / f"{benchmark.name}.json").exists(), f"{benchmark.name} was not run"


def test_the_command_makes_the_page_again(tmp_path: Path) -> None:
    """The page could not be made but by measuring again."""
    out = tmp_path / "benchmarks"
    out.mkdir()
    for path in PAGE.with_suffix("").glob("*.json"):
        (out / path.name).write_text(path.read_text())
    done = CliRunner().invoke(command.main, ["--page-only", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.with_suffix(".md").read_text().startswith("# Benchmarks")
    assert "io: write at least 0.97" in done.output


def test_an_engine_that_cannot_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not build would end the run; or be left out without a word."""

    def fails(directory: Path) -> engines.Engine:
        raise ImportError("no libaio here")

    working: Callable[[Path], engines.Engine] = Files
    monkeypatch.setattr(engines, "ENGINES", {"A": fails, "B": working})
    monkeypatch.setattr(engines, "TENSORS", 2)
    monkeypatch.setattr(engines, "TENSOR_BYTES", MIB)
    monkeypatch.setattr(engines, "ROUNDS", 1)

    class Reference:
        def run(self, direction: str) -> float:
            return 1e9

    first, second = engines.measure(tmp_path, Reference(), silent)  # type: ignore[arg-type]
    assert first == {"name": "A", "failure": "ImportError: no libaio here"}
    assert second["write"]["fio"]["median"] > 0


class Files:
    """An engine of plain files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, number: int, tensor: torch.Tensor) -> None:
        (self._directory / str(number)).write_bytes(bytes(tensor.numpy()))

    def read(self, number: int, tensor: torch.Tensor) -> None:
        data = bytearray((self._directory / str(number)).read_bytes())
        tensor.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def finish(self) -> None:
        """All is done."""

    def tensor(self) -> torch.Tensor:
        return torch.empty(MIB, dtype=torch.uint8)


def test_peers_are_named_whether_they_are_here_or_not() -> None:
    """A table of ratios would not say what it is of, or pass over who is missing."""
    assert set(peers.versions()) == {
        "fio",
        "Axolotl's Disco",
        "DeepSpeed async_io",
        "TensorNVMe",
    }
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "make bench " in listed
    assert "make bench-full" in listed
