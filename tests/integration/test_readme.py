"""The README's training snippet runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.daemon import Daemon

README = Path(__file__).parents[2] / "README.md"


def test_readme_snippet_trains(daemon: Daemon) -> None:
    """Else the first lines that a user copies would fail, or would offload nothing."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", snippet],
        env=os.environ | {"DISCOD_SOCKET_DIR": str(daemon.socket_dir), "DISCOD_ARENA": "64MiB"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert f"saved_bytes={8 * 4096 * 1024 * 4}" in result.stdout
