"""One part, in this process: ``python -m tests.gpu.part NAME JSON``; see :mod:`tests.gpu.runner`.

Rows go to stdout, a JSON object a line; whatever else is printed goes to stderr.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bench import Bench, Row, guarded


def bench_of(part: str, settings: dict[str, Any]) -> Bench:
    """The part's bench, with directories of its own."""
    device = torch.device(settings["device"])
    if device == torch.device("cuda"):  # some of torch.cuda takes no device without an index
        device = torch.device("cuda", 0)
    scratch, sockets = Path(settings["scratch"]) / part, Path(settings["sockets"]) / part
    scratch.mkdir()
    sockets.mkdir()
    return Bench(
        part,
        device,
        quick=settings["quick"],
        seconds=settings["seconds"],
        scratch=scratch,
        sockets=sockets,
        out=Path(settings["out"]),
    )


def main() -> None:
    """Run the part that the arguments name."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    rows = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        bench = bench_of(name, settings)
        if not bench.on_gpu:
            torch.set_num_threads(1)
        module = importlib.import_module(f"tests.gpu.{name}")
        found: Iterator[Row] = guarded(name, module.run(bench))
        for row in found:
            print(json.dumps(asdict(row)), file=rows, flush=True)


if __name__ == "__main__":
    main()
