"""A job on two nodes, each with a daemon of its own; torchrun places the ranks."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from discod.status import fetch_status
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.jobs import ROOT
from tests.helpers.node import Node, join
from tests.helpers.tools import needs
from tests.integration.conftest import privileged_or_skip

RANKS_PER_NODE = 2
STEPS = 2
SOCKET_DIR = Path("/run/discod")
LINE = r"rank (\d) step (\d): gradients equal, norm ([\d.]+), (\d+) MiB written"


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes that reach each other."""
    privileged_or_skip("a node")
    for program in ("unshare", "nsenter", "ip"):
        needs(program)
    nodes = [Node(0), Node(1)]
    join(*nodes)
    yield nodes
    for node in nodes:
        node.close()


def torchrun(nodes: list[Node], number: int) -> subprocess.Popen[str]:
    """The part of the job that runs on one node."""
    options = [f"--nnodes={len(nodes)}", f"--nproc-per-node={RANKS_PER_NODE}"]
    options += [f"--node-rank={number}", f"--master-addr={nodes[0].address}", "--master-port=29500"]
    environment = [
        f"GLOO_SOCKET_IFNAME={Node.INTERFACE}",
        "DISCOD_ARENA=4MiB",
        "OMP_NUM_THREADS=1",
    ]
    return subprocess.Popen(
        [
            *(*nodes[number].prefix, "env", *environment),
            *(sys.executable, "-m", "torch.distributed.run", *options),
            *(str(ROOT / "docker" / "train.py"), str(STEPS)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_job_on_two_nodes(
    nodes: list[Node], start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Gradients would differ in a job on several nodes, or its ranks use one node's daemon.

    train.py compares each step's gradients with those of plain checkpointing in the same job.
    """
    outside = []
    for number, node in enumerate(nodes):
        scratch = tmp_path / f"nvme{number}"
        scratch.mkdir()
        start_daemon(scratch=scratch, socket_dir=SOCKET_DIR, prefix=node.prefix, ready=False)
        outside.append(node.path(SOCKET_DIR))
    for directory in outside:
        eventually((directory / "io.sock").exists, what="the start of a daemon")

    said = []
    with contextlib.ExitStack() as parts:
        running = [parts.enter_context(torchrun(nodes, number)) for number in range(len(nodes))]
        for part in running:
            parts.callback(part.kill)
        statuses = [status_with_clients(directory) for directory in outside]
        for part in running:
            out, _ = part.communicate(timeout=60)
            assert part.returncode == 0, out
            said += re.findall(LINE, out)
    assert len(said) == len(nodes) * RANKS_PER_NODE * STEPS
    assert sorted({int(rank) for rank, *_ in said}) == [0, 1, 2, 3]
    assert all(int(written) for *_, written in said), "nothing went through the disk"
    for step in range(STEPS):
        norms = {norm for _, at, norm, _ in said if int(at) == step}
        assert len(norms) == 1, "the ranks do not have the same gradients"
    assert [sorted(one["rank"] for one in status["clients"]) for status in statuses] == [
        [0, 1],
        [2, 3],
    ]
    assert [status["scratch"][0]["path"] for status in statuses] == [
        str(tmp_path / "nvme0"),
        str(tmp_path / "nvme1"),
    ]


def status_with_clients(socket_dir: Path) -> dict[str, list[dict[str, object]]]:
    """A daemon's status while all its node's ranks are attached."""
    found: dict[str, list[dict[str, object]]] = {}

    def attached() -> bool:
        found.update(json.loads(fetch_status(socket_dir)))
        return len(found["clients"]) == RANKS_PER_NODE

    eventually(attached, 60, "the ranks' attach")
    return found
