"""``python -m tests.fuzz``: fuzz each target under atheris, and say how much was run.

It needs atheris (for Python 3.11 at this time) beside the daemon's own dependencies. Inputs that
reach new code are kept in ``--keep``; one that breaks an invariant is written there as
``TARGET/crash-...``, and the exit code is 1. ``--minimise`` then replaces ``tests/fuzz/corpus`` by
the fewest inputs that reach the same code.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import discod
from tests.fuzz.targets import CORPUS, TARGETS

DAEMON = str(Path(discod.__file__).parent)
LONGEST_INPUT_BYTES = {"bytes": 1024, "near": 512, "tenant": 128, "conversation": 96}


def libfuzzer(target: str, *args: str) -> tuple[int, str]:
    """Run it, and return its exit code and what it said."""
    command = [sys.executable, "-m", "tests.fuzz.libfuzzer", target, *args]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return result.returncode, result.stdout.decode(errors="replace")


def fuzz(target: str, executions: int, seed: int, keep: Path) -> bool:
    """Run one target and print a line about it; whether nothing was found."""
    directory = keep / target
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code, said = libfuzzer(
        target,
        f"-runs={executions}",
        f"-seed={seed}",
        f"-max_len={LONGEST_INPUT_BYTES[target]}",
        f"-artifact_prefix={directory}/",
        str(directory),
        str(CORPUS / target),
    )
    done = re.findall(r"^#(\d+)", said, re.MULTILINE)
    seconds = time.monotonic() - began
    inputs = len(list(directory.iterdir()))
    print(
        f"{target}: seed {seed}, {done[-1] if done else 0} executions in {seconds:.0f} s, "
        f"{inputs} inputs kept, {'nothing found' if not code else 'FOUND'}",
        flush=True,
    )
    if code:
        print(said[-4000:])
    return code == 0


def reached(target: str, data: bytes) -> set[tuple[str, int, int]]:
    """The steps from line to line in the daemon's code that an input makes."""
    steps: set[tuple[str, int, int]] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(DAEMON):
            return None
        before = frame.f_lineno

        def line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal before
            steps.add((name, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        TARGETS[target](data)
    finally:
        sys.settrace(None)
    return steps


def minimise(target: str, keep: Path) -> None:
    """Replace the target's corpus by inputs that reach all that it and what was kept reach."""
    directories = [
        directory for directory in (CORPUS / target, keep / target) if directory.is_dir()
    ]
    inputs = {path.read_bytes() for directory in directories for path in directory.iterdir()}
    steps: set[tuple[str, int, int]] = set()
    chosen = {b""}
    ordered = sorted(inputs, key=lambda data: (len(data), data))
    for data in [*ordered[:10], *ordered]:
        new = reached(target, data)
        if not new <= steps or len(chosen) < 10:
            chosen.add(data)
            steps |= new
    shutil.rmtree(CORPUS / target)
    (CORPUS / target).mkdir()
    for data in chosen:
        (CORPUS / target / hashlib.sha1(data).hexdigest()).write_bytes(data)
    print(f"{target}: {len(chosen)} inputs in the corpus")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--executions", type=int, default=100_000, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-results"))
    parser.add_argument("--minimise", action="store_true")
    options = parser.parse_args()
    targets = options.targets or list(TARGETS)
    for target in targets:
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
    if options.minimise:
        for target in targets:
            minimise(target, options.keep)
        return 0
    found = [
        target
        for target in targets
        if not fuzz(target, options.executions, options.seed, options.keep)
    ]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
