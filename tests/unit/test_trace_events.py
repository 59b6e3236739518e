"""Records as Chrome trace events: names, rows, times, and the merge with a profile."""

import errno
from itertools import pairwise
from typing import Any

import pytest

from discod.recorder import FAILED, Kind, Record
from discod.trace import Part, Trace
from discod.trace_events import BASE_KEY, DEVICE_PID, HIDDEN_PID, base_ns, make_trace, merge

REALTIME_NS = 1_790_857_026_000_000_000 + 5_000_000_000
"""Of the zero of the monotonic clock: 5 s after a base of torch's."""


def call(**changes: Any) -> Record:
    """A write of 8 MiB from 2 ms to 4 ms."""
    fields = {
        "queued_ns": 1_500_000,
        "began_ns": 2_000_000,
        "ended_ns": 4_000_000,
        "length": 8 << 20,
        "pid": 77,
        "rank": 1,
        "blobs": 1,
        "outcome": 0,
        "kind": int(Kind.WRITE),
        "thread": 0,
    }
    return Record(**fields | changes)


def wait(began_ms: int, ended_ms: int, kind: Kind = Kind.READ_WAIT, **changes: Any) -> Record:
    times = dict.fromkeys(("queued_ns", "began_ns"), began_ms * 10**6)
    wanted = {"length": 0, "blobs": 0, "kind": int(kind), "ended_ns": ended_ms * 10**6}
    return call(**times | wanted | changes)


def trace(calls: list[Record] | None = None, waits: list[Record] | None = None) -> Trace:
    devices = (("nvme0n1: /nvme", Part(calls or [], 0)),)
    return Trace(5, devices, Part(waits or [], 0), REALTIME_NS)


def spans(made: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in made["traceEvents"] if event["ph"] == "X"]


def names(made: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in made["traceEvents"]
        if event.get("name") == what
    }


def test_a_call_says_what_a_reader_needs() -> None:
    """Who looks at a trace would have to guess whose I/O it is and how long it was queued."""
    base = base_ns(REALTIME_NS)
    made = make_trace(trace([call()]), 0, base)
    (span,) = spans(made)
    assert span == {
        "ph": "X",
        "cat": "discod I/O",
        "name": "write",
        "pid": DEVICE_PID,
        "tid": 1,
        "ts": 5_002_000.0,
        "dur": 2000.0,
        "args": {
            "bytes": 8 << 20,
            "blobs": 1,
            "client pid": 77,
            "rank": 1,
            "queued ms": 0.5,
            "outcome": "done",
            "GB/s": 4.194,
        },
    }
    assert made[BASE_KEY] == base
    assert names(made, "process_name") == {(DEVICE_PID, 0): "discod (pid 5) nvme0n1: /nvme"}
    assert names(made, "thread_name") == {(DEVICE_PID, 1): "I/O thread 0"}


@pytest.mark.parametrize(
    ("outcome", "text"),
    [(errno.ENOSPC, "ENOSPC"), (FAILED, "failed"), (4000, "errno 4000")],
)
def test_a_failed_call_says_why_and_has_no_rate(outcome: int, text: str) -> None:
    """A failed write would look like a fast one."""
    (span,) = spans(make_trace(trace([call(outcome=outcome)]), 0, 0))
    assert span["args"]["outcome"] == text
    assert "GB/s" not in span["args"]


def test_only_what_ended_since_is_in_it() -> None:
    """``--seconds 5`` would show minutes."""
    calls = [call(ended_ns=3_000_000), call(ended_ns=6_000_000)]
    made = make_trace(trace(calls, [wait(1, 2)]), 5_000_000, 0)
    assert [span["dur"] for span in spans(made)] == [4000.0]
    assert names(made, "process_name").keys() == {(DEVICE_PID, 0)}


def test_waits_that_overlap_have_rows_of_their_own() -> None:
    """Viewers nest spans of one row, so waits of two threads would be drawn as one in another."""
    waits = [wait(0, 4), wait(1, 2), wait(3, 6), wait(4, 5), wait(1, 2, Kind.ROOM_WAIT)]
    made = make_trace(trace([], waits), 0, 0)
    rows: dict[int, list[tuple[float, float]]] = {}
    for span in spans(made):
        rows.setdefault(span["tid"], []).append((span["ts"], span["ts"] + span["dur"]))
    assert len(rows) == 3
    for row in rows.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(row))
    assert sorted(names(made, "thread_name").values()) == [
        "discod: wait for a read",
        "discod: wait for a read",
        "discod: wait for room",
    ]


def test_clients_that_are_not_seen_are_kept_apart() -> None:
    """Two ranks in containers, whose pids are unknown, would be one process in the trace."""
    waits = [wait(0, 1, pid=0, rank=0), wait(0, 1, pid=0, rank=1), wait(0, 1, pid=9, rank=-1)]
    made = make_trace(trace([], waits), 0, 0)
    named = {pid: name for (pid, _), name in names(made, "process_name").items()}
    del named[DEVICE_PID]
    assert named == {
        HIDDEN_PID + 1: "trainer rank 0 (pid unknown)",
        HIDDEN_PID + 2: "trainer rank 1 (pid unknown)",
        9: "trainer (pid 9)",
    }


def test_a_span_never_ends_before_it_begins() -> None:
    """A client that reports nonsense would make a file that viewers refuse."""
    made = make_trace(trace([], [wait(5, 1)]), 0, 0)
    assert [span["dur"] for span in spans(made)] == [0]


def test_a_merge_keeps_the_profile_and_its_clock() -> None:
    """The profile's own events or names would be lost, or ours lie hours beside them."""
    theirs = [
        {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "pid": 9, "tid": 9, "ts": 1.0, "dur": 1.0},
        {"ph": "e", "id": 1},
    ]
    base = REALTIME_NS - 10**9
    profile = {"schemaVersion": 1, "traceEvents": theirs, BASE_KEY: base}
    made = merge(profile, trace([call()], [wait(0, 1, pid=9)]), 0)
    assert made["schemaVersion"] == 1
    assert made[BASE_KEY] == base
    assert made["traceEvents"][:3] == theirs
    assert names(made, "process_name")[9, 0] == "python"
    assert [span["ts"] for span in spans(made)] == [1.0, 1_002_000.0, 1_000_000.0]
    assert "discod: wait for a read" in names(made, "thread_name").values()


@pytest.mark.parametrize(
    "profile", [{}, {"traceEvents": {}}, {"traceEvents": [], BASE_KEY: "1"}], ids=str
)
def test_what_is_no_profile_is_refused(profile: dict[str, Any]) -> None:
    """A wrong file would end the command with a stack trace."""
    with pytest.raises(ValueError, match="as torch"):
        merge(profile, trace(), 0)


def test_a_ring_knows_how_far_it_reaches() -> None:
    """A trace with its beginning missing would be taken for a quiet disk."""
    assert Part([], 0).reaches(0)
    assert Part([call()], 0).reaches(0)
    assert not Part([call()], 1).reaches(0)
    assert Part([call(), call()], 1).reaches(4_000_001)
