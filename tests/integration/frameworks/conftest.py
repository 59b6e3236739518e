"""Tests of frameworks that are not installed are left out, and named at the end of the run.

With DISCOD_TEST_REQUIRE_ALL=1 they are not left out, and fail.
"""

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.daemon import Daemon


def missing(test: Path) -> set[str]:
    """The packages that ``test`` imports and that are not installed."""
    names = set()
    for node in ast.parse(test.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    packages = {name.partition(".")[0] for name in names}
    return {package for package in packages if importlib.util.find_spec(package) is None}


left_out = {path.name: missing(path) for path in sorted(Path(__file__).parent.glob("test_*.py"))}
collect_ignore = [
    name
    for name, packages in left_out.items()
    if packages and os.environ.get("DISCOD_TEST_REQUIRE_ALL") != "1"
]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was left out."""
    for name in collect_ignore:
        reason = f"{', '.join(sorted(left_out[name]))} not installed"
        terminalreporter.write_line(f"LEFT OUT {name}: {reason}")


@pytest.fixture
def attached(attach_to: Callable[..., None], shared_daemon: Daemon) -> None:
    """This process is attached, and offloads the tensors of tiny models."""
    attach_to(shared_daemon, arena="32MiB", min_bytes="4KiB")
