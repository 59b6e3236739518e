"""Axolotl's published package without what it depends on: downloaded once, imported in part."""

import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VERSION = "0.19.0"
CACHE = Path(sys.prefix) / ".cache" / f"axolotl-{VERSION}"
"""Beside the packages that pip has installed, and gone with them."""

NOT_RUN = ("axolotl.core.trainers", "axolotl.core.trainers.mixins")
"""Packages whose ``__init__`` pulls in dozens of others; their modules are imported alone."""


class Dict(dict[str, object]):
    """What Axolotl uses of ``addict.Dict``."""

    def __getattr__(self, name: str) -> object:
        return self[name]


def source() -> Path:
    """A directory to import ``axolotl`` from; skips the test when it cannot be had."""
    if not CACHE.exists():
        CACHE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", folder]
            result = subprocess.run(
                [*command, f"axolotl=={VERSION}"], capture_output=True, text=True, check=False
            )
            if result.returncode:
                _give_up(result.stderr.strip().splitlines()[-1])
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(f"{folder}/unpacked")
            os.rename(f"{folder}/unpacked", CACHE)
    return CACHE


def _give_up(reason: str) -> None:
    if os.environ.get("DISCOD_TEST_REQUIRE_ALL") == "1":
        pytest.fail(f"DISCOD_TEST_REQUIRE_ALL is set, and axolotl cannot be downloaded: {reason}")
    pytest.skip(f"axolotl cannot be downloaded: {reason}")


@contextmanager
def importable() -> Iterator[None]:
    """``axolotl`` can be imported inside, as far as what is installed here goes."""
    path = source()
    before = set(sys.modules)
    sys.path.insert(0, str(path))
    for name in NOT_RUN:
        package = types.ModuleType(name)
        package.__path__ = [str(path.joinpath(*name.split(".")))]
        sys.modules[name] = package
    addict = types.ModuleType("addict")
    vars(addict)["Dict"] = Dict
    sys.modules.setdefault("addict", addict)
    try:
        yield
    finally:
        sys.path.remove(str(path))
        for name in set(sys.modules) - before:
            if name == "addict" or name.split(".")[0] == "axolotl" or name.endswith(".axolotl"):
                del sys.modules[name]
