"""Tests against the real frameworks; each file runs where its framework is installed."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.daemon import Daemon

HERE = Path(__file__).parent

collect_ignore = [
    path.name
    for path in HERE.glob("test_*.py")
    if importlib.util.find_spec(path.stem.removeprefix("test_")) is None
    and os.environ.get("DISCOD_TEST_REQUIRE_ALL") != "1"
]


@pytest.fixture
def attached(attach_to: Callable[..., None], shared_daemon: Daemon) -> None:
    """This process is attached, and offloads the tensors of tiny models."""
    attach_to(shared_daemon, arena="32MiB", min_bytes="4KiB")
