"""Every file in ``examples/`` runs as it stands, and moves what it says."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.run import parse_args as parse_torchrun

from tests.helpers import nursery
from tests.helpers.daemon import Daemon

EXAMPLES = Path(__file__).parents[2] / "examples"
ARENA = "4MiB"

SAID = {
    "plain_loop.py": r"step 2: loss [\d.]+, saved 8 MiB, written 4 MiB",
    "ddp.py": r"rank [01]: saved 8 MiB, written 4 MiB a step\n",
    "offload_block.py": r"saved 13 tensors, 13 MiB, of which [1-9]\d* MiB were written\n"
    r"gradients equal: True",
    "own_tensors.py": r"20 tensors came back; [1-9]\d* MiB were written, [1-9]\d* MiB read\n"
    r"still held: 0",
    "hf_trainer.py": r"the last step: 4 tensors, 4 MiB, [1-9]\d* MiB written",
    "trl_sft.py": r"the last step: [34] tensors, [34] MiB, [1-9]\d* MiB written",
}
"""What is in the output: exact figures where the policy leaves no choice."""

ARENAS = {"own_tensors.py": "16MiB", "hf_trainer.py": "2MiB", "trl_sft.py": "2MiB"}
NEEDS = {"hf_trainer.py": ("transformers",), "trl_sft.py": ("trl", "peft", "datasets")}
COMMAND = re.compile(r"^(?:python|torchrun (?P<options>.*)) examples/(?P<file>\w+\.py)$", re.M)


def test_every_example_is_run_by_a_test_and_listed() -> None:
    """Else an example could rot unseen, or nobody would find it."""
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix != ".pyc"}
    elsewhere = {"README.md", "__init__.py", "__pycache__"}
    tested_by_others = {
        "demo": Path(__file__).with_name("test_demo.py"),
        "axolotl.yaml": Path(__file__).parent / "frameworks" / "test_axolotl.py",
    }
    assert files - elsewhere == SAID.keys() | tested_by_others.keys()
    for name, test in tested_by_others.items():
        assert name in test.read_text()
    readme = (EXAMPLES / "README.md").read_text()
    listed = set(re.findall(r"^\| \[.*?\]\(([\w.]+)", readme, re.MULTILINE))
    assert listed == files - elsewhere


@pytest.mark.parametrize("name", SAID)
def test_example(name: str, shared_daemon: Daemon, tmp_path: Path) -> None:
    """Else what a reader copies would fail, or not offload anything."""
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    command = COMMAND.search((EXAMPLES / name).read_text())
    assert command is not None, "its docstring does not say how it is run"
    assert command["file"] == name
    environment = os.environ | {
        "DISCOD_SOCKET_DIR": str(shared_daemon.socket_dir),
        "DISCOD_ARENA": ARENAS.get(name, ARENA),
        "HF_HUB_OFFLINE": "1",
    }
    with ranks_of(command["options"]) as ranks:
        processes = [
            nursery.start(
                EXAMPLES / name,
                cwd=tmp_path,
                env=environment | rank,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in ranks
        ]
        try:
            said = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.close()
    for process, (out, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, err
        assert re.search(SAID[name], out or ""), out
    assert shared_daemon.status()["clients"] == []


@contextmanager
def ranks_of(options: str | None) -> Iterator[list[dict[str, str]]]:
    """The environment of each process, as torchrun with ``options`` gives it; None: of the one.

    Without torchrun's own processes, which import torch for seconds: ``test_demo.py`` and
    ``test_runner.py`` have real ones.
    """
    if options is None:
        yield [{}]
        return
    arguments = parse_torchrun([*options.split(), "script"])
    assert arguments.standalone
    world = int(arguments.nproc_per_node)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, not in rank 0
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    yield [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
