"""Scripts as processes, alone and by the runner, and the commands of its page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from tests.helpers import plain_script
from tests.helpers.jobs import ROOT
from tests.helpers.pages import DOCS

SCRIPT = ROOT / "tests" / "helpers" / "plain_script.py"
PAGE = (DOCS / "frameworks" / "script.md").read_text()
RUNNER = ("-m", "disco_client")


def plain_gradients(path: Path) -> Path:
    """The gradients of the script, by this process and without discod: the file with them."""
    plain_script.main(["--out", str(path)])
    return path.with_name(f"{path.name}0")


def start(*command: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def run(*command: str | Path, **environment: str) -> str:
    """Run to the end; what it wrote on stderr."""
    code, _, err = ended(start(*command, **environment))
    assert code == 0, err
    return err


def gradients(path: Path) -> list[torch.Tensor]:
    loaded: list[torch.Tensor] = torch.load(path)
    return loaded


def equal(one: Path, other: Path) -> bool:
    return all(map(torch.equal, gradients(one), gradients(other)))


def summary_of(err: str) -> list[str]:
    """The number of tensors in each summary line."""
    return re.findall(r"^discod.*?: (\d+) tensors", err, re.MULTILINE)


def by_the_page(launcher: str, scratch: Path, *own: str) -> list[str | Path]:
    """The page's command that begins with ``launcher``, as a command of this Python.

    Args:
        launcher: The first word.
        scratch: What stands for ``/nvme``.
        own: More options for the launcher.
    """
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (line,) = [line for line in block.splitlines() if line.startswith(launcher + " ")]
    places = {"/nvme": scratch, "train.py": SCRIPT, "8": "2", "1e-4": "0.1"}
    return [*own, *(places.get(word, word) for word in line.split()[1:])]
