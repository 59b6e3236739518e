"""The script of docs/gpu.md and its commands, as they stand, on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

from discod.cli import main
from tests.helpers.daemon import Daemon
from tests.helpers.pages import DOCS

PAGE = (DOCS / "gpu.md").read_text()
RANKS = 2


def command(program: str) -> list[str]:
    """The arguments of the page's command that begins with ``program``."""
    (line,) = re.findall(rf"^{program} (.*)$", PAGE, re.MULTILINE)
    return [str(word) for word in line.split()]


def test_the_pages_script_trains(daemon: Daemon, tmp_path: Path) -> None:
    """Else the first script that a user copies for a GPU would fail, there or without one."""
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (name,) = re.findall(r"Save this as `([\w.]+)`", PAGE)
    (tmp_path / name).write_text(script)
    arguments = [word.replace("=8", f"={RANKS}") for word in command("torchrun")]
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=tmp_path,
        env=os.environ
        | {
            "DISCOD_SOCKET_DIR": str(daemon.socket_dir),
            "DISCOD_ARENA": "16MiB",  # half of what a step saves
            "CUDA_VISIBLE_DEVICES": "",  # or there would have to be as many GPUs as ranks
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    (promised,) = re.findall(r"Each rank should print `(\w+=\d+)`", PAGE)
    # torchrun runs ranks unbuffered: a line's end is a write of its own, so lines may share one.
    printed = dict(re.findall(r"rank (\d+): (Counters\(.*?\))", result.stdout))
    assert sorted(printed) == [str(rank) for rank in range(RANKS)], result.stdout
    for counters in printed.values():
        assert f"({promised}," in counters
        assert "written_bytes=0," not in counters


def test_the_pages_daemon_exists() -> None:
    """Else the line before it would fail."""
    main.make_context("discod", command("discod"))
