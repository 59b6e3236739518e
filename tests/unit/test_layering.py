"""Imports go one way: ``disco_client`` to ``discod.wire``, never back, and torch, zmq stay put.

Read from the sources, so that imports inside functions count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"discod": ROOT / "discod", "disco_client": ROOT / "client" / "disco_client"}

SHARED = ("discod.wire", "discod.__version__", "discod.cuda_driver")
"""All that the client may import of the daemon's package."""


class Rule(NamedTuple):
    """``who`` imports nothing of ``forbidden`` except ``allowed``, for the reason in ``why``."""

    who: tuple[str, ...]
    forbidden: tuple[str, ...]
    why: str
    allowed: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()


RULES = (
    Rule(("discod",), ("torch", "disco_client"), "the daemon knows neither torch nor the client"),
    Rule(("discod.wire",), ("discod",), "the wire knows nothing of the daemon", SHARED),
    Rule(("discod.cuda_driver",), ("discod",), "the CUDA driver knows nothing of the daemon"),
    Rule(("disco_client",), ("discod",), "the client shares only the wire", SHARED),
    Rule(
        ("discod", "disco_client"),
        ("zmq",),
        "one module on each side speaks ZeroMQ",
        exempt=("discod.router", "disco_client.io_connection"),
    ),
    Rule(
        ("discod", "disco_client"),
        ("prometheus_client", "http"),
        "the metrics are loaded only when they are asked for",
        exempt=("discod.metrics", "discod.metrics_server"),
    ),
    Rule(
        ("discod", "disco_client"),
        ("torch.cuda",),
        "CUDA has a module of its own",
        exempt=("disco_client.cuda",),
    ),
    Rule(
        ("discod", "disco_client"),
        ("discod.cuda_driver",),
        "only the GPU process and the client's CUDA modules touch the driver",
        exempt=(
            "discod.gpu",
            "discod.gpu_client",
            "discod.gpu_arena",
            "discod.checkup.gpu",
            "disco_client.cuda",
            "disco_client.pinning",
            "disco_client.ipc",
            "disco_client.ring",
        ),
    ),
    Rule(
        (
            "disco_client.residency",
            "disco_client.holdings",
            "disco_client.loans",
            "disco_client.records",
            "disco_client.ahead",
            "disco_client.room",
            "disco_client.reader",
            "disco_client.plan",
            "disco_client.blobs",
            "disco_client.instructions",
            "disco_client.extents",
        ),
        ("torch", "os", "socket", "mmap", "ctypes", "threading", "time", "pathlib"),
        "policy does no I/O, so that it can be simulated",
    ),
)


def imports(source: str) -> Iterator[str]:
    """Every dotted name that ``source`` imports; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are banned"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    """Whether ``name`` is one of ``packages``, or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(module: str, source: str) -> list[str]:
    """The imports of ``module`` that break a rule, each with the reason of the rule."""
    return [
        f"{module} imports {name}: {rule.why}"
        for name in imports(source)
        for rule in RULES
        if within(module, *rule.who)
        and not within(module, *rule.exempt)
        and within(name, *rule.forbidden)
        and not within(name, *rule.allowed)
    ]


def modules() -> Iterator[tuple[str, str]]:
    """Every module of both packages: its dotted name and its source."""
    for package, directory in PACKAGES.items():
        for path in sorted(directory.rglob("*.py")):
            parts = path.relative_to(directory).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path.read_text()


def test_imports_go_one_way() -> None:
    """Else the daemon could not start without torch, or the client would need the daemon's code."""
    found = [violation for module, source in modules() for violation in violations(module, source)]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("discod.engine", "import torch"),
        ("discod.engine", "def f():\n    from disco_client import errors"),
        ("discod.engine", "import zmq"),
        ("discod.wire.codec", "from discod import storage"),
        ("disco_client.arena", "from discod.storage import Scratch"),
        ("disco_client.arena", "from discod import storage"),
        ("disco_client.arena", "import torch.cuda"),
        ("disco_client.residency", "import os.path"),
        ("discod.cuda_driver", "from discod import storage"),
        ("discod.gpus", "from discod import cuda_driver"),
        ("discod.wire.codec", "from discod.cuda_driver import load"),
    ],
)
def test_every_rule_bites(module: str, source: str) -> None:
    """Else a rule that matches nothing would pass for ever."""
    assert len(violations(module, source)) == 1


def test_the_daemon_starts_without_torch() -> None:
    """Else the daemon's start would take seconds, through whatever third party pulls torch in."""
    code = "import sys, discod.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
