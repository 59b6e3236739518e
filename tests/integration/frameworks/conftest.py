"""Tests against the real frameworks; each file runs where its packages are installed."""

import importlib.util
import os
from collections.abc import Callable

import pytest

from tests.helpers.daemon import Daemon

NEEDS = {
    "test_transformers.py": ("transformers", "accelerate"),
    "test_peft.py": ("transformers", "accelerate", "peft"),
    "test_trl.py": ("transformers", "accelerate", "peft", "datasets", "trl"),
}
"""The packages without which a file is left out, unless DISCOD_TEST_REQUIRE_ALL=1."""

collect_ignore = [
    name
    for name, packages in NEEDS.items()
    if os.environ.get("DISCOD_TEST_REQUIRE_ALL") != "1"
    and not all(importlib.util.find_spec(package) for package in packages)
]


@pytest.fixture
def attached(attach_to: Callable[..., None], shared_daemon: Daemon) -> None:
    """This process is attached, and offloads the tensors of tiny models."""
    attach_to(shared_daemon, arena="32MiB", min_bytes="4KiB")
