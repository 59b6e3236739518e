"""The short forms of ``python -m tests.chaos``; a long one is ``make chaos``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 280
"""A quiet machine needs 10; others may need its cores at the same time."""


def chaos(out: Path, name: str, *options: str) -> Any:
    """Run it; the figures."""
    command = [sys.executable, "-m", "tests.chaos", "--out", str(out), *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.timeout(SECONDS + 10)
def test_chaos(tmp_path: Path) -> None:
    """Something that a kill, a full disk or a failing one does in mid-step is lost, or leaks."""
    figures = chaos(tmp_path, "chaos", "--seed", "14", "--rounds", "3", "--fast")
    assert figures["failure"] == ""
    assert figures["rounds"] == 3
    assert figures["steps"] >= 9
    assert figures["disk_bytes"] > 0
    assert figures["leaked_bytes"] == 0
    assert figures["kills"]["daemon SIGKILL"] > 0
    assert 0 < figures["slowest_reclaim_seconds"] < 10, "a killed rank's memory and disk stay"


@pytest.mark.timeout(SECONDS + 10)
def test_restarts_under_load(tmp_path: Path) -> None:
    """An upgrade of the daemon in the middle of training would cost the run: a job under DDP."""
    figures = chaos(tmp_path, "restarts", "--seed", "1", "--restarts", "3", "--ddp")
    assert figures["restarts"] == 3
    assert figures["steps"] >= 6
    assert figures["disk_bytes"] > 0
