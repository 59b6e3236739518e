"""An attachment with small limits, so that small tensors go all the way through the daemon."""

from collections.abc import Callable

import pytest

from tests.helpers.daemon import Daemon
from tests.helpers.forms import MIN_BYTES


@pytest.fixture(autouse=True)
def attached(attach_to: Callable[..., None], shared_daemon: Daemon) -> None:
    """This process, attached with a small arena."""
    attach_to(shared_daemon, arena="4MiB", min_bytes=MIN_BYTES)
