"""``python -m tests.gpu`` without a GPU, so that the one try on hardware is not spent on typing."""

import contextlib
import json
import os
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import torch
from click.testing import CliRunner

from tests.gpu import longest, machine, overlap, pinning, races, report, runner
from tests.gpu.__main__ import main
from tests.gpu.bench import Bench, Row, at_least, at_most, guarded, left_out
from tests.gpu.faults import helper_pid
from tests.gpu.llama import Shape
from tests.helpers import nursery
from tests.helpers.daemon import eventually


def plan(directory: Path, *parts: str, **changes: Any) -> runner.Plan:
    """A run on the CPU with all its files in ``directory``."""
    for name in ("scratch", "sockets", "out"):
        (directory / name).mkdir()
    settings: dict[str, Any] = {
        "parts": parts,
        "device": "cpu",
        "quick": True,
        "seconds": 100.0,
        "jobs": 1,
    }
    places = {name: directory / name for name in ("scratch", "sockets", "out")}
    return runner.Plan(**(settings | places | changes))


def line(part: str, ok: bool | None, value: str = "v") -> runner.Line:
    """A row as the runner has it."""
    return {"part": part, **asdict(Row("w", value, ok=ok))}


@pytest.mark.timeout(600)  # under a minute on an idle machine
def test_the_whole_script_runs_without_a_gpu(tmp_path: Path, short_dir: Path) -> None:
    """Else the script would rot unseen, and fail in the minutes that there is a GPU."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = ["-m", "tests.gpu", "--device", "cpu", "--quick"]
    command += ["--out", str(tmp_path / "out"), "--scratch", str(scratch), "--seconds", "550"]
    process = nursery.start(
        *command,
        env=os.environ | {"TMPDIR": str(short_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        said = process.communicate()
    finally:
        process.close()
    assert process.returncode == 0, said
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    judged = {row["part"] for row in results["rows"] if row["ok"]}
    assert judged == set(runner.LIMITS_SECONDS) - runner.GPU_ONLY - {"step", "longest"}
    assert {row["part"] for row in results["rows"]} == set(runner.LIMITS_SECONDS)
    assert "torch" in results["header"]
    assert results["passed"]
    table = (tmp_path / "out" / "results.md").read_text()
    assert table.count("\n| ") == len(results["rows"]) + 2
    curves = ElementTree.parse(tmp_path / "out" / "longest.svg").iter("{*}polyline")
    assert all(" " in curve.attrib["points"] for curve in curves)
    assert list(scratch.iterdir()) == []
    assert list(short_dir.iterdir()) == []


def test_a_part_out_of_time_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one copy that hangs would cost the results of all parts."""
    monkeypatch.setitem(runner.LIMITS_SECONDS, "memory", 0.001)
    shown: list[runner.Line] = []
    lines = runner.run(plan(tmp_path, "memory", "graphs"), shown.append)
    assert shown == lines
    assert [(row["part"], row["what"], row["ok"]) for row in lines] == [
        ("memory", "time limit", False),
        ("memory", "time", None),
        ("graphs", "all of it", None),
    ]
    assert not report.passed(lines)


def test_a_part_that_fails_is_told(tmp_path: Path) -> None:
    """Else a part that did not even start would count as passed."""
    lines = runner.run(plan(tmp_path, "memory", device="nowhere"), lambda row: None)
    assert lines[0]["ok"] is False
    assert lines[0]["value"].startswith("exit code 1")
    assert "nowhere" in lines[0]["value"]


def test_parts_without_time_left_are_not_run(tmp_path: Path) -> None:
    """Else the whole would take longer than it was given."""
    (row,) = runner.run(plan(tmp_path, "memory", seconds=0.0), lambda row: None)
    assert row["ok"] is False
    assert row["value"].startswith("not run")


@pytest.mark.parametrize(
    ("device", "version", "count", "text"),
    [
        ("cuda", None, 0, "is built without CUDA"),
        ("cuda:1", "13.0", 0, "sees no GPU"),
        ("cuda:9", "13.0", 2, "cuda:9: this machine has 2 GPUs"),
        ("cuda:1", "13.0", 1, "cuda:1: this machine has 1 GPU"),
        ("cuda:0x", "13.0", 1, "'cuda:0x' is none of cpu, cuda and cuda:N"),
        ("nowhere", "13.0", 1, "'nowhere' is none of cpu, cuda and cuda:N"),
    ],
)
def test_without_a_usable_gpu_nothing_is_begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    version: str | None,
    count: int,
    text: str,
) -> None:
    """Else nine parts would fail one after the other, each with a long error of torch's."""
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    out = tmp_path / "out"
    outcome = CliRunner().invoke(main, ["--device", device, "--out", str(out)])
    assert outcome.exit_code == click.UsageError.exit_code == 2
    assert text in outcome.output
    assert not out.exists()


def test_usable_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one try on hardware would be refused."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [machine.unusable(name) for name in ("cpu", "cuda", "cuda:0", "cuda:1")] == [None] * 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_results_and_nothing_else(
    tmp_path: Path, short_dir: Path, number: signal.Signals
) -> None:
    """Else what is interrupted would lose its figures, or leave daemons and files behind."""
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    command = ["-m", "tests.gpu", "--device", "cpu", "--quick", "--out", str(out)]
    command += ["--scratch", str(scratch), "--only", "graphs", "--only", "races"]
    environment = os.environ | {"TMPDIR": str(short_dir)}
    process = nursery.start(*command, env=environment, stdout=subprocess.DEVNULL)
    try:
        log = out / "races.daemon.log"
        eventually(lambda: log.exists() and log.stat().st_size, 60, "a daemon")
        family = psutil.Process(process.pid).parent().children(recursive=True)
        before = json.loads((out / "results.json").read_text())
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.close()
    assert [row["part"] for row in before["rows"]] == ["graphs"]
    after = json.loads((out / "results.json").read_text())
    assert after["rows"][0] == before["rows"][0]
    assert ("races", "interrupted") in [(row["part"], row["value"]) for row in after["rows"]]
    assert not after["passed"]
    assert len(family) >= 3
    eventually(lambda: not any(map(running, family)), 10, "the end of the part and its daemon")
    assert list(scratch.iterdir()) == []
    assert list(short_dir.iterdir()) == []


def running(process: psutil.Process) -> bool:
    """Whether it has not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_part_without_rows_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a part that did nothing at all would count as passed."""
    monkeypatch.setitem(runner.LIMITS_SECONDS, "nothing", 60)
    monkeypatch.setattr(runner, "COMMAND", ("-c", ""))
    lines = runner.run(plan(tmp_path, "nothing"), lambda row: None)
    assert [(row["what"], row["ok"]) for row in lines] == [("end", False), ("time", None)]


def bench(directory: Path, sockets: Path, part: str) -> Bench:
    """A part's, on the CPU and in its tiny form."""
    device = torch.device("cpu")
    return Bench(part, device, True, 60.0, scratch=directory, sockets=sockets, out=directory)


def test_races_that_never_ran_are_not_ok(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else "nothing stays" would be ok where nothing was ever saved."""
    monkeypatch.setattr(races, "_race", lambda *arguments: iter(()))
    rows = list(races.run(bench(tmp_path, short_dir, "races")))
    assert [row.ok for row in rows if row.what.startswith("nothing stays")] == [False, False]
    assert not any(row.ok for row in rows)


def test_pinning_without_pinned_memory_is_not_ok(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else equal gradients would be said to be those over a pinned arena."""
    monkeypatch.setattr(
        pinning, "SHAPE", Shape(layers=2, width=64, batch=1, length=64, head_width=64)
    )
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    rows = list(pinning.run(bench(tmp_path, short_dir, "pinning")))
    assert [(row.what, row.ok) for row in rows] == [
        ("pinned", False),
        ("gradients, pinned", None),
        ("asked to pin", False),
        ("gradients, not pinned", None),
    ]


def test_an_exception_is_a_failed_row() -> None:
    """Else a part's later checks would be lost with the first one that raises."""

    def rows() -> Iterator[Row]:
        yield Row("one", "1")
        raise torch.OutOfMemoryError("all of it")

    first, second = guarded("both", rows())
    assert first == Row("one", "1")
    assert (second.ok, second.value) == (False, "OutOfMemoryError: all of it")


def test_goals_are_judged() -> None:
    """Else a figure beyond its goal would pass, or one that was not taken would."""
    assert [at_least("rate", value, 0.9).ok for value in (0.9, 0.899)] == [True, False]
    assert [at_most("time", value, 1.02).ok for value in (1.02, 1.021)] == [True, False]
    assert left_out("rate", "no GPU").ok is None
    assert report.passed([line("step", True), line("step", None)])
    assert not report.passed([line("step", True), line("step", False)])
    assert not report.passed([])
    assert not report.passed([line("step", None)])


def test_summary_tells_what_was_left_out() -> None:
    """Else a run that looked at nothing would read as one that only measured."""
    missing = {"part": "step", **asdict(left_out("overlap", "needs a GPU"))}
    lines = [line("step", ok) for ok in (True, True, False, None)]
    assert report.summary([*lines, missing]) == "2 ok, 1 failed, 1 left out, 1 figure"


def test_markdown_keeps_its_columns() -> None:
    """Else an error's text with a bar or a line break in it would tear the table."""
    page = report.markdown({"gpu": "none"}, [line("step", True, "a|b\nc")])
    assert r"| step | w | a\|b c |  | ok |" in page


def test_overlap_of_copies_and_kernels() -> None:
    """Else copies would be said to be hidden that were waited for."""

    def event(category: str, name: str, start: float, micros: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": micros}

    found = overlap.of_events(
        [
            {"ph": "M", "name": "process_name"},
            event("cpu_op", "aten::mm", 0, 1000),
            event("kernel", "gemm", 100, 50),
            event("kernel", "gemm on another stream", 120, 60),
            event("kernel", "gemm", 300, 100),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 150, 100),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 310, 20),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 500, 70),
        ]
    )
    assert found == overlap.Overlap(copies=120, covered=50, pinned=100)


@pytest.mark.parametrize("limit", [8192, 40000, 65536, 100000])
def test_search_finds_the_longest(limit: int) -> None:
    """Else a sequence would be called the longest that is not, or that does not fit."""
    tried: list[int] = []

    def attempt(length: int) -> longest.Fit | None:
        tried.append(length)
        return longest.Fit(length, 0.0, length) if length <= limit else None

    found = longest.search(attempt, 8192, 1 << 20, refinements=5, seconds=60)
    lengths = [fit.length for fit in found.fits]
    assert lengths == sorted(lengths)
    assert lengths[-1] <= limit
    assert found.too_long is not None
    assert limit < found.too_long <= lengths[-1] * 1.25
    assert len(tried) == len(set(tried))


def test_search_minds_the_time() -> None:
    """Else one step of a long sequence would take all the time that there is."""
    found = longest.search(lambda n: longest.Fit(n, n / 1000, 0), 1000, 1 << 20, 2, seconds=20)
    assert [fit.length for fit in found.fits] == [1000, 2000]
    assert found.too_long is None


def test_search_without_room_for_the_shortest() -> None:
    """Else the table would be empty, and say nothing of why."""
    with pytest.raises(RuntimeError, match="not even 1000 tokens"):
        longest.search(lambda n: None, 1000, 8000, 2, seconds=20)


def test_pid_of_the_gpu_process() -> None:
    """Else the script would kill the wrong process, or none."""
    stopped, running = {"uuid": "GPU-1", "pid": 0}, {"uuid": "GPU-2", "pid": 3}
    assert helper_pid({"pid": 1, "gpus": []}) is None
    assert helper_pid({"pid": 1, "gpus": [stopped, running]}) == 3
