"""Fixtures for the client's side. The daemon's are in ``tests/integration/conftest.py``."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """OpenMP threads that spin for each other on two shared cores cost more than they bring.

    Here, and in the processes that tests start.
    """
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        import torch

        torch.set_num_threads(1)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_second_interrupt() -> Iterator[None]:
    """An interrupt that a test makes and Python loses would come again in the middle of the next.

    ``test_process_life.py`` shows it in processes of their own.
    """
    from disco_client import interrupts

    with mock.patch.object(interrupts, "_thread"):
        yield


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="dc-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def attach_to() -> Iterator[Callable[..., None]]:
    """``attach_to(daemon, **settings)`` attaches this process until the test ends."""
    import disco_client

    def attach(daemon: Any, **settings: Any) -> None:
        disco_client.connect(daemon.socket_dir, **settings)

    yield attach
    disco_client.close()


@pytest.fixture
def attach(attach_to: Callable[..., None], daemon: Any) -> Callable[..., None]:
    """``attach(**settings)`` attaches this process to the test's own daemon."""
    return lambda **settings: attach_to(daemon, **settings)


@pytest.fixture(scope="session")
def first_seed() -> int:
    """Of random programs; DISCOD_TEST_SEED tries others than usual."""
    return int(os.environ.get("DISCOD_TEST_SEED", "0"))
