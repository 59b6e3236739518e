"""``discod trace`` of a real daemon, beside the trace that ``torch.profiler`` makes of the same."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.profiler import profile, record_function

import disco_client
from discod.attach import MOST_TRACE_REQUESTS
from discod.cli import main
from discod.exits import Exit
from discod.recorder import MOST_AT_A_TIME, Record
from discod.trace import Part, fetch_trace
from discod.trace_events import BASE_KEY, DEVICE_PID
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import Done, Read, Report, TraceReply, TraceRequest, WaitFor
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.faults import Rules
from tests.helpers.raw_client import MIB, RawClient, greet

CLOCK_SLACK_US = 10_000
"""How far the clocks of the two traces may be apart: torch's is a counter of the CPU's, fitted to
the clock."""

Trace = Callable[..., dict[str, Any]]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """``trace(daemon, *options)``: what ``discod trace`` wrote."""

    def run(daemon: Daemon, *options: str, name: str = "trace.json") -> dict[str, Any]:
        out = tmp_path / name
        command = ["trace", "-o", str(out), "--socket-dir", str(daemon.socket_dir), *options]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        written = out.read_bytes()
        made: dict[str, Any] = json.loads(
            gzip.decompress(written) if out.suffix == ".gz" else written
        )
        return made

    return run


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[RawClient]:
    attached = RawClient(shared_daemon.socket_dir, rank=3)
    yield attached
    attached.close()


def spans(made: dict[str, Any], category: str) -> list[dict[str, Any]]:
    events = made["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event.get("cat") == category]


def io_of(made: dict[str, Any], pid: int) -> list[dict[str, Any]]:
    return [span for span in spans(made, "discod I/O") if span["args"]["client pid"] == pid]


def overlap_us(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """For how long both one of ``some`` and one of ``others`` went on, counted in pairs."""
    return sum(
        max(0.0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]))
        for a in some
        for b in others
    )


def train(steps: int) -> None:
    """Steps whose saves do not fit into an arena of 16 MiB, with real computation in between."""
    layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(8))
    for _ in range(steps):
        hidden = torch.randn(2048, 512)
        for layer in layers:
            hidden = disco_client.checkpoint(layer, hidden)
        hidden.sum().backward()


def test_io_beside_the_computation(
    start_daemon: Callable[..., Daemon],
    attach_to: Callable[..., None],
    trace: Trace,
    tmp_path: Path,
) -> None:
    """A user could not see what the disk did while the layers ran, or see it at another time."""
    daemon = start_daemon("--chunk", "1MiB")
    attach_to(daemon, arena="16MiB")
    train(1)
    with profile() as recorded:
        train(2)
    exported = tmp_path / "profile.json"
    recorded.export_chrome_trace(str(exported))
    made = trace(daemon, "--seconds", "100")

    check_form(made)
    calls = spans(made, "discod I/O")
    (status,) = daemon.status()["clients"]
    assert status["written_bytes"] > 0
    for kinds, total in (
        ({"write"}, status["written_bytes"]),
        ({"read ahead", "urgent read"}, status["read_bytes"]),
    ):
        assert sum(call["args"]["bytes"] for call in calls if call["name"] in kinds) == total
    assert {call["args"]["client pid"] for call in calls} == {os.getpid()}
    assert {call["args"]["outcome"] for call in calls} == {"done"}

    computed = json.loads(exported.read_text())
    assert computed[BASE_KEY] == made[BASE_KEY]
    compute = [span for span in spans(computed, "cpu_op") if "mm" in span["name"]]
    assert overlap_us(calls, compute) > 0
    annotations = [span["name"] for span in spans(computed, "user_annotation")]
    assert annotations.count("discod::save") == 16
    assert annotations.count("discod::load") == 16

    both = trace(daemon, "--seconds", "100", "--merge", str(exported), name="both.json.gz")
    assert both["traceEvents"][: len(computed["traceEvents"])] == computed["traceEvents"]
    assert len(spans(both, "discod I/O")) == len(calls)


def check_form(made: dict[str, Any]) -> None:
    """What viewers want: known processes and threads, and spans of one row that do not overlap."""
    events = made["traceEvents"]
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for span in (event for event in events if event["ph"] == "X"):
        assert span["dur"] >= 0
        assert span["pid"] in processes
        rows.setdefault((span["pid"], span["tid"]), []).append(span)
    assert rows.keys() == threads
    for row in rows.values():
        row.sort(key=lambda span: span["ts"])
        for span, after in pairwise(row):
            assert span["ts"] + span["dur"] <= after["ts"] + 0.01  # as floats in us


def test_waits_of_a_client(shared_daemon: Daemon, client: RawClient, trace: Trace) -> None:
    """Where a step's time goes would be shown of the disk alone, or each wait twice."""
    now = time.monotonic_ns()
    spans_ns = [now - 3_000_000, now - 1_000_000]
    names = {field.name for field in dataclasses.fields(Report)} - {"seq", "epoch", "spans"}
    numbers = dict.fromkeys(names, 1)
    for _ in range(2):
        for what in WaitFor:
            assert isinstance(client.ask(Report, spans=(int(what), *spans_ns), **numbers), Done)
    made = trace(shared_daemon)
    waits = [span for span in spans(made, "discod wait") if span["pid"] == os.getpid()]
    assert [span["name"] for span in waits] == [
        "wait for room",
        "wait for a read",
        "wait for a copy off the device",
    ]
    assert {span["dur"] for span in waits} == {2000.0}
    assert {span["args"]["rank"] for span in waits} == {3}
    check_form(made)


def test_waits_of_a_trainer(
    start_daemon: Callable[..., Daemon],
    attach_to: Callable[..., None],
    trace: Trace,
    tmp_path: Path,
) -> None:
    """A wait would not be there, or not lie beside the span that torch's profiler has of it."""
    rules = Rules(tmp_path / "rules")
    daemon = start_daemon(env=rules.environment)
    rules.set("pwritev delay=0.1")
    attach_to(daemon, arena="16MiB")
    with profile() as recorded:
        train(1)
    assert disco_client.stats().save_wait_seconds > 0.01
    exported = tmp_path / "profile.json"
    recorded.export_chrome_trace(str(exported))
    annotations = spans(json.loads(exported.read_text()), "user_annotation")
    theirs = [span for span in annotations if span["name"] == "discod::wait"]
    assert theirs

    def reported() -> list[dict[str, Any]]:
        made = trace(daemon)
        check_form(made)
        return [span for span in spans(made, "discod wait") if span["name"] == "wait for room"]

    ours = eventually(reported, what="a report of the waits")
    total = sum(span["dur"] for span in ours)
    assert total == pytest.approx(disco_client.stats().save_wait_seconds * 1e6, rel=0.01)
    assert overlap_us(ours, theirs) > 0.8 * total


def test_clocks_agree(
    shared_daemon: Daemon, client: RawClient, trace: Trace, tmp_path: Path
) -> None:
    """What the disk did would be shown before or after the operation that waited for it."""
    with profile() as recorded:
        for name in ("warm", "marker"):  # the first one loads the profiler's operators
            with record_function(name):
                client.write(0, 0, MIB)
    exported = tmp_path / "profile.json"
    recorded.export_chrome_trace(str(exported))
    computed = json.loads(exported.read_text())
    (marker,) = [span for span in spans(computed, "user_annotation") if span["name"] == "marker"]
    write = io_of(trace(shared_daemon), os.getpid())[-1]
    assert write["name"] == "write"
    assert write["args"]["rank"] == 3
    assert marker["ts"] - CLOCK_SLACK_US <= write["ts"]
    assert write["ts"] + write["dur"] <= marker["ts"] + marker["dur"] + CLOCK_SLACK_US


def test_waiting_records_what_comes(
    shared_daemon: Daemon, client: RawClient, tmp_path: Path
) -> None:
    """``--wait`` would give the past, or end before its time."""
    client.write(0, 0, MIB)
    out = tmp_path / "trace.json"
    socket_dir = str(shared_daemon.socket_dir)
    command = [sys.executable, "-m", "discod", "trace", "-o", str(out), "--socket-dir", socket_dir]
    with subprocess.Popen([*command, "--wait", "1.5"], stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            client.read(0, 0, 4096, urgent=True)
        assert process.returncode == 0
    calls = io_of(json.loads(out.read_text()), os.getpid())
    assert {call["name"] for call in calls} == {"urgent read"}
    assert 0.5e6 < calls[-1]["ts"] - calls[0]["ts"] < 20e6


def test_many_parts_are_put_together(
    shared_daemon: Daemon, client: RawClient, trace: Trace
) -> None:
    """Calls would be missing, twice there or out of order where one message does not hold them."""
    count = MOST_AT_A_TIME + 200
    client.write(0, 0, MIB)
    before = len(io_of(trace(shared_daemon), os.getpid()))
    fields = {"file": 0, "slot": 0, "length": 4096, "checksum": b"", "urgent": True}
    seqs = [client.send(Read, offset=i % 256 * 4096, **fields) for i in range(count)]
    for seq in seqs:
        assert isinstance(client.answer(seq), Done)
    calls = io_of(trace(shared_daemon, "--seconds", "1000"), os.getpid())[before:]
    assert [call["args"]["bytes"] for call in calls] == [4096] * count
    for thread in {call["tid"] for call in calls}:  # threads record in their own order alone
        begins = [call["ts"] for call in calls if call["tid"] == thread]
        assert begins == sorted(set(begins))


def test_what_is_forgotten_is_said(
    shared_daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace whose beginning the daemon has forgotten would be taken for a quiet disk."""
    whole = fetch_trace(shared_daemon.socket_dir)
    record = Record(0, 0, time.monotonic_ns(), 4096, 1, -1, 1, 0, 2, 0)
    cut = dataclasses.replace(whole, waits=Part([record], forgotten=1))
    monkeypatch.setattr("discod.trace.fetch_trace", lambda socket_dir: cut)
    command = ["trace", "-o", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0
    assert "what came before is missing" in result.output


def test_questions_without_end_are_cut_off(shared_daemon: Daemon) -> None:
    """One peer could keep the event loop busy with the same question for ever."""
    lifeline, _ = greet(shared_daemon.socket_dir)
    with lifeline:
        for _ in range(MOST_TRACE_REQUESTS):
            send_message(lifeline, TraceRequest(1 << 40, 0))
            reply, _ = receive_message(lifeline, TraceReply)
            assert (reply.first, reply.end, reply.records) == (0, 0, b"")
        with pytest.raises(ConnectionError):
            receive_message(lifeline, TraceReply)


def test_no_daemon(socket_dir: Path, tmp_path: Path) -> None:
    """A script would take the lack of a daemon for an empty trace."""
    out = tmp_path / "trace.json"
    for more in ([], ["--wait", "100"]):
        command = ["trace", "-o", str(out), "--socket-dir", str(socket_dir), *more]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == Exit.NO_DAEMON
        assert "no discod daemon listens" in result.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "1", "--wait", "1"], "give one of them"),
        (["--merge", "{bad}"], "cannot be read"),
        (["--merge", "{list}"], "is no trace that torch.profiler exported"),
        (["--merge", "{empty}"], "as torch.profiler exports it"),
        (["--merge", "{out}"], "name another one"),
    ],
    ids=str,
)
def test_wrong_options(
    shared_daemon: Daemon, tmp_path: Path, options: list[str], message: str
) -> None:
    """A mistake would end in a stack trace, or in a profile that is overwritten."""
    files = {"bad": "{", "list": "[]", "empty": "{}", "out": "{}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = [option.format(**{name: tmp_path / name for name in files}) for option in options]
    where = ["-o", str(tmp_path / "out"), "--socket-dir", str(shared_daemon.socket_dir)]
    result = CliRunner().invoke(main, ["trace", *where, *options])
    assert result.exit_code == Exit.USAGE
    assert message in result.output
    assert (tmp_path / "out").read_text() == "{}"


def test_a_file_that_cannot_be_written(shared_daemon: Daemon, tmp_path: Path) -> None:
    """The command would claim to have written a trace."""
    out = tmp_path / "missing" / "trace.json"
    command = ["trace", "-o", str(out), "--socket-dir", str(shared_daemon.socket_dir)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == Exit.USAGE
    assert f"{out} cannot be written: No such file or directory" in result.output


def test_devices_are_processes(
    start_daemon: Callable[..., Daemon],
    raw_client: Callable[..., RawClient],
    trace: Trace,
    short_dir: Path,
) -> None:
    """Two directories on one device would be shown as two disks."""
    places = [short_dir / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    daemon = start_daemon(scratch=places)
    client = raw_client(daemon)
    for file in range(2):
        client.write(0, 0, 4096, file)
    made = trace(daemon)
    processes = [event for event in made["traceEvents"] if event["name"] == "process_name"]
    assert [process["pid"] for process in processes] == [DEVICE_PID]
    name = processes[0]["args"]["name"]
    assert all(str(place) in name for place in places)
    assert str(daemon.pid) in name
