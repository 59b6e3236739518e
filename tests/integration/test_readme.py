"""The README's training snippet runs as it stands."""

import os
import re
import subprocess
from pathlib import Path

from tests.helpers import nursery
from tests.helpers.daemon import Daemon

README = Path(__file__).parents[2] / "README.md"


def test_readme_snippet_trains(daemon: Daemon, tmp_path: Path) -> None:
    """Else the first lines that a user copies would fail, or print what the README does not say."""
    readme = README.read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (arena,) = re.findall(r"^DISCOD_ARENA=(\w+) python train\.py$", readme, re.MULTILINE)
    (tmp_path / "train.py").write_text(snippet)
    process = nursery.start(
        "train.py",
        cwd=tmp_path,
        env=os.environ | {"DISCOD_SOCKET_DIR": str(daemon.socket_dir), "DISCOD_ARENA": arena},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.close()
    assert process.returncode == 0, err
    (shown,) = re.findall(r"^    (Counters\(.*), \.\.\.\)$", readme, re.MULTILINE)
    assert out.startswith(shown)
    assert f"saved_bytes={8 * 4096 * 1024 * 4}" in shown
