"""The systems that discod is measured against: which are here, and how to get them.

``python -m tests.benchmarks.peers`` installs what can be installed into the Python that runs it,
each from its published package. What cannot be is said, and every benchmark does without it.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

AXOLOTL = "0.19.0"
DEEPSPEED = "0.19.8"
TENSORNVME = "0.1.0"

AXOLOTL_CACHE = Path(sys.prefix) / ".cache" / f"axolotl-{AXOLOTL}"
"""Where the package lies unpacked; only modules without its many dependencies are used."""

_NOTES = Path(sys.prefix) / ".cache" / "peers"
"""Why something could not be installed, a file each."""


def versions() -> dict[str, str]:
    """Each peer's version, or why there is none."""
    return {
        "fio": fio() or "not installed (package fio)",
        "Axolotl's Disco": AXOLOTL if AXOLOTL_CACHE.exists() else _missing("axolotl"),
        "DeepSpeed async_io": _version("deepspeed"),
        "TensorNVMe": _version("tensornvme"),
    }


def fio() -> str | None:
    """Its version; None: it is not installed."""
    if shutil.which("fio") is None:
        return None
    done = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _missing(package)
    return _missing(package) if (_NOTES / package).exists() else version


def _missing(package: str) -> str:
    note = _NOTES / package
    return f"could not be run: {note.read_text() if note.exists() else 'not installed'}"


def _pip(*arguments: str, **environment: str) -> str | None:
    """Run pip; the last line of what it said when it failed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if not done.returncode:
        return None
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in said if "error" in line.lower()] or said or ["pip failed"]
    return errors[0][:200]


def _install_axolotl() -> str | None:
    if AXOLOTL_CACHE.exists():
        return None
    with tempfile.TemporaryDirectory(dir=AXOLOTL_CACHE.parent) as folder:
        failure = _pip(
            *("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder),
            f"axolotl=={AXOLOTL}",
        )
        if failure is not None:
            return failure
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(f"{folder}/unpacked")
        os.rename(f"{folder}/unpacked", AXOLOTL_CACHE)
    return None


def _install(package: str, version: str) -> str | None:
    if importlib.util.find_spec(package) is not None:
        return None
    # Their build scripts import torch, so that they cannot be built apart from it.
    return _pip(
        "install", "--quiet", "--no-build-isolation", f"{package}=={version}", DS_BUILD_OPS="0"
    )


def _build_async_io() -> str | None:
    """DeepSpeed compiles its engine when it is first used; here, so that no benchmark waits."""
    program = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    if not done.returncode:
        return None
    said = (done.stderr or done.stdout).strip().splitlines() or ["it does not build"]
    return f"async_io does not build (it needs g++ and libaio-dev): {said[-1][:200]}"


def install() -> None:
    """Install what can be, and note why the rest cannot."""
    _NOTES.mkdir(parents=True, exist_ok=True)
    failures = {
        "axolotl": _install_axolotl(),
        "deepspeed": _install("deepspeed", DEEPSPEED) or _build_async_io(),
        "tensornvme": _install("tensornvme", TENSORNVME),
    }
    for package, failure in failures.items():
        if failure is None:
            (_NOTES / package).unlink(missing_ok=True)
        else:
            (_NOTES / package).write_text(failure)
    for name, state in versions().items():
        print(f"{name}: {state}")


if __name__ == "__main__":
    install()
