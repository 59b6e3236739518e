"""Measures the matrix and writes it into the page: ``python -m tests.compatibility``."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.compatibility.page import PAGE, render, with_measured_part
from tests.compatibility.verdicts import judge
from tests.helpers.daemon import Daemon
from tests.helpers.jobs import run_job

RANKS = 2


LIMIT_SECONDS = 280
"""It takes 25 on an idle machine with two cores."""


def run_matrix(socket_dir: Path) -> list[dict[str, Any]]:
    """Run all cells against the daemon there; the ranks' reports."""
    settings = {"socket_dir": str(socket_dir)}
    return run_job(RANKS, settings, "tests.compatibility.rank", LIMIT_SECONDS)


def main() -> None:
    """Start a daemon, run the ranks, write the page."""
    folder = Path(tempfile.mkdtemp(prefix="discod-"))
    scratch = folder / "scratch"
    scratch.mkdir()
    daemon = Daemon(scratch=scratch, socket_dir=folder, log_path=folder / "daemon.log")
    try:
        daemon.wait_until_ready()
        tables = render(judge(run_matrix(folder)))
    finally:
        daemon.close()
        shutil.rmtree(folder)
    PAGE.write_text(with_measured_part(PAGE.read_text(), tables))
    print(tables)


if __name__ == "__main__":
    main()
