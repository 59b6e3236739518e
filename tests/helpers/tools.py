"""Programs that a test needs and a machine may lack."""

import os
import shutil

import pytest


def needs(what: str, here: bool | None = None) -> None:
    """Skip the test without ``what``; with ``DISCOD_TEST_REQUIRE_ALL=1`` fail instead.

    Args:
        what: A program, looked for in PATH; or, with ``here``, anything.
        here: Whether it is here.
    """
    if shutil.which(what) is not None if here is None else here:
        return
    if os.environ.get("DISCOD_TEST_REQUIRE_ALL") == "1":
        pytest.fail(f"DISCOD_TEST_REQUIRE_ALL is set, and there is no {what}")
    pytest.skip(f"there is no {what}")
