"""``--write-budget`` over real clients: the cap, its record, and what a trainer sees of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import disco_client
from discod.window import since_boot
from discod.wire.messages import Done, Failed, Failure, Ping, Write
from discod.write_record import NAME, boot_id
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.raw_client import MIB, RawClient
from tests.helpers.steps import SETTINGS, expected, step
from tests.integration.conftest import ClearError

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]
Attach = Callable[..., None]


def recorded(daemon: Daemon) -> int:
    """Bytes in the daemon's record."""
    try:
        record = json.loads((daemon.scratch / NAME).read_text())
    except FileNotFoundError:
        return 0
    return sum(size for _, size in record["written"])


def write_some(client: RawClient, count: int) -> list[Any]:
    """Write a MiB so many times at once; the answers."""
    seqs = [
        client.send(Write, file=0, offset=n * MIB, slot=n % 16 * MIB, length=MIB)
        for n in range(count)
    ]
    return [client.answer(seq) for seq in seqs]


def test_all_clients_together_keep_to_it(start_daemon: Start, raw_client: Connect) -> None:
    """A node's disk would be worn out by several jobs that each keep to the limit."""
    daemon = start_daemon("--write-budget", "8MiB/hour")
    clients = [raw_client(daemon) for _ in range(3)]
    with ThreadPoolExecutor(len(clients)) as pool:
        answers = list(pool.map(lambda client: write_some(client, 6), clients))
    refused = [answer for many in answers for answer in many if isinstance(answer, Failed)]
    assert len(refused) == 18 - 8
    for answer in refused:
        assert answer.kind == Failure.OVER_BUDGET
        for part in ("write budget of 8.0 MiB/hour is used up", "--write-budget"):
            assert part in answer.text
    status = daemon.status()
    assert status["written_bytes"] == status["write_budget_used_bytes"] == 8 * MIB
    assert sum(client["written_last_day_bytes"] for client in status["clients"]) == 8 * MIB
    assert status["written_bytes_per_day"] > 8 * MIB
    assert status["write_budget_short_seconds"] > 0
    assert daemon.log.count("write budget of 8.0 MiB/hour is used up") == 1
    shown = subprocess.run(
        [sys.executable, "-m", "discod", "status", "--socket-dir", str(daemon.socket_dir)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "write budget: 8.0 MiB used of 8.0 MiB per hour" in shown
    assert "SHORT" in shown
    written = clients[0].ask(Write, file=0, offset=0, slot=0, length=MIB)
    assert isinstance(written, Failed)


def test_it_outlives_the_daemon(start_daemon: Start, raw_client: Connect) -> None:
    """A restart, or a crash, would give each job a new budget."""
    daemon = start_daemon("--write-budget", "8MiB/hour")
    client = raw_client(daemon)
    assert all(isinstance(answer, Done) for answer in write_some(client, 6))
    eventually(lambda: recorded(daemon) >= 6 * MIB, what="the record")
    daemon.kill()
    daemon = start_daemon("--write-budget", "8MiB/hour")
    used = daemon.status()["write_budget_used_bytes"]
    assert 6 * MIB <= used <= 6 * MIB + 8 * MIB // 128
    client.detach()
    client.attach(daemon.socket_dir)
    kinds = [type(answer) for answer in write_some(client, 3)]
    assert kinds == [Done, Failed, Failed]
    daemon.terminate()
    assert daemon.wait() == 0
    assert recorded(daemon) == used + MIB
    daemon = start_daemon("--write-budget", "16MiB/hour")
    assert daemon.status()["write_budget_used_bytes"] == used + MIB
    client.detach()
    client.attach(daemon.socket_dir)
    assert isinstance(client.write(0, 0, MIB), Done), "a larger budget has room"


def test_what_is_over_it_stays_in_ram(start_daemon: Start, attach_to: Attach) -> None:
    """A trainer with memory enough would fail for a disk that it need not write to."""
    daemon = start_daemon("--write-budget", "2MiB/hour")
    attach_to(daemon, **(SETTINGS | {"arena": "8MiB"}))
    for seed in range(2):
        assert step(seed) == expected(seed)
    assert daemon.status()["written_bytes"] <= 2 * MIB


def test_no_room_in_ram_either(
    start_daemon: Start, attach_to: Attach, clear_error: ClearError
) -> None:
    """The trainer would stand still for an hour, or end without a word of what to change."""
    daemon = start_daemon("--write-budget", "2MiB/hour")
    attach_to(daemon, **SETTINGS)
    with clear_error(disco_client.ScratchFull, "write budget used up") as caught:
        step(0)
    for part in (
        "write budget of 2.0 MiB/hour is used up",
        "1.0 h",
        "--write-budget (DISCOD_WRITE_BUDGET)",
        "DISCOD_ARENA",
    ):
        assert part in str(caught.value)
    daemon.kill()
    larger = start_daemon("--write-budget", "64MiB/hour")
    assert step(1) == expected(1)
    assert larger.status()["written_bytes"] > 0


def test_a_short_wait_is_waited_for(
    start_daemon: Start, raw_client: Connect, attach_to: Attach, scratch: Path
) -> None:
    """A step would fail that needs a few seconds' patience."""
    for seconds in (1, 8, 40):  # more than one on machines that are too busy to begin in time
        about_to_leave = [since_boot() - 3600 + seconds, 64 * MIB]
        record = {"version": 1, "boot": boot_id(), "written": [about_to_leave]}
        (scratch / NAME).write_text(json.dumps(record))
        daemon = start_daemon("--write-budget", "64MiB/hour")
        client = raw_client(daemon)
        seq = client.send(Write, file=0, offset=0, slot=0, length=MIB)
        client.ask(Ping)
        if daemon.status()["write_budget_held"] == 1:
            break
        daemon.kill()
    attach_to(daemon, **SETTINGS)
    assert step(0) == expected(0)
    assert isinstance(client.answer(seq), Done)
    assert "is used up: writes wait for it" in daemon.log
    status = daemon.status()
    assert status["write_budget_held"] == 0
    assert 0 < status["write_budget_used_bytes"] < 64 * MIB


def test_without_a_budget_nothing_is_left_behind(start_daemon: Start, raw_client: Connect) -> None:
    """Each scratch directory would have a file that nobody asked for."""
    daemon = start_daemon()
    assert isinstance(raw_client(daemon).write(0, 0, MIB), Done)
    daemon.terminate()
    assert daemon.wait() == 0
    assert list(daemon.scratch.iterdir()) == []
