"""The client's package in this environment: found without importing it, which would load torch."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import discod
from discod.checkup.finding import Finding, ok, warn
from discod.wire import PROTOCOL_VERSION

LEAST_TORCH = (2, 6)
"""As in pyproject.toml."""


def check_client() -> Iterator[Finding]:
    """The findings."""
    yield _package()
    yield _torch()


def _package() -> Finding:
    """It has its protocol from ``discod.wire``, so that it is the one that is installed with it."""
    check = "client"
    spec = importlib.util.find_spec("disco_client")
    if spec is None or spec.origin is None:
        found = "disco_client is not found: trainers in this environment cannot use discod"
        return warn(check, found, "install discod here as a whole: pip install 'discod[torch]'")
    where = Path(spec.origin).parent
    return ok(
        check,
        f"disco_client in {where} uses {Path(discod.__file__).parent}: protocol {PROTOCOL_VERSION}",
    )


def _torch() -> Finding:
    check = "torch"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ok(check, "not installed here: the daemon does not need it, trainers do")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return warn(check, f"{version}", f"install torch {least} or later")
    return ok(check, version)
