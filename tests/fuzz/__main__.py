"""``python -m tests.fuzz``: fuzz each target under atheris, and say how much was run.

It needs atheris (for Python 3.11 at this time) beside the daemon's own dependencies. Inputs that
reach new code are kept in ``--keep``; one that breaks an invariant is written there as
``TARGET/crash-...``, and the exit code is 1. ``--minimise`` then replaces ``tests/fuzz/corpus`` by
the fewest inputs that reach the same code.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.targets import CORPUS, TARGETS

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


def minimise(target: str, keep: Path) -> None:
    """Replace the target's corpus by what reaches the same code, of it and of what was kept."""
    old, new = CORPUS / target, CORPUS / f"{target}.new"
    new.mkdir()
    code, said = libfuzzer(target, "-set_cover_merge=1", str(new), str(keep / target), str(old))
    if code:
        shutil.rmtree(new)
        raise SystemExit(said)
    shutil.rmtree(old)
    new.rename(old)
    print(f"{target}: {len(list(old.iterdir()))} inputs in the corpus")


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
