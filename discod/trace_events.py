"""Records as Chrome trace events, which Perfetto, chrome://tracing and torch's own viewers read.

Each scratch device is a process with its I/O threads, and each client one with its waits. *Clocks:*
times are microseconds of ``CLOCK_REALTIME`` from a base on, as ``torch.profiler`` writes them: its
base is the beginning of a quarter of the mean year, so that files of any time in it lie beside each
other as they are. A file that is merged has its own base said in it.

The format: "Trace Event Format" of the Chromium project; the base: ``ChromeTraceBaseTime`` in
Kineto's ``output_json.cpp``.
"""

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from discod.recorder import FAILED, Kind, Record
from discod.trace import Trace

BASE_STEP_NS = 7_889_238 * 10**9
"""A quarter of 365.2425 days, in seconds, as Kineto has it."""

DEVICE_PID = 1 << 23
"""Devices are numbered from here on: above all pids that Linux gives (PID_MAX_LIMIT, 2^22)."""
HIDDEN_PID = 1 << 24
"""The same for clients whose pid is not seen from here, from rank -1 on."""
WAIT_TID = 1 << 23
"""The same for rows of waits among the threads of a client."""
ROWS = 1 << 10
"""From the first row of one kind of waits to the first of the next."""

BASE_KEY = "baseTimeNanoseconds"

_CALLS = {
    Kind.URGENT_READ: "urgent read",
    Kind.READ_AHEAD: "read ahead",
    Kind.WRITE: "write",
}
_WAITS = {
    Kind.ROOM_WAIT: "wait for room",
    Kind.READ_WAIT: "wait for a read",
    Kind.DEVICE_WAIT: "wait for a copy off the device",
}

Event = dict[str, Any]


def base_ns(realtime_ns: int) -> int:
    """The base that ``torch.profiler`` would take at this time of ``CLOCK_REALTIME``."""
    return realtime_ns // BASE_STEP_NS * BASE_STEP_NS


def make_trace(trace: Trace, since_ns: int, base: int) -> dict[str, Any]:
    """The trace as an object to be written as JSON.

    Args:
        trace: What the daemon gave.
        since_ns: Only what ended after this time of ``CLOCK_MONOTONIC``.
        base: In nanoseconds of ``CLOCK_REALTIME``.
    """
    return {
        "displayTimeUnit": "ms",
        BASE_KEY: base,
        "traceEvents": list(_events(trace, since_ns, trace.realtime_ns - base)),
    }


def merge(profile: Mapping[str, Any], trace: Trace, since_ns: int) -> dict[str, Any]:
    """What :func:`make_trace` makes in one object with what ``torch.profiler`` exported.

    Raises:
        ValueError: ``profile`` is no such object.
    """
    events, base = profile.get("traceEvents"), profile.get(BASE_KEY, 0)
    if not isinstance(events, list) or type(base) is not int:
        raise ValueError('it has no list "traceEvents", as torch.profiler exports it')
    # What the profile names, it names better.
    known = [event for event in events if isinstance(event, dict)]
    named = {event.get("pid") for event in known if event.get("name") == "process_name"}
    ours = _events(trace, since_ns, trace.realtime_ns - base)
    more = [event for event in ours if not (event["ph"] == "M" and _names(event, named))]
    return {**profile, "traceEvents": [*events, *more]}


def _names(event: Event, pids: set[Any]) -> bool:
    """Whether it says the name or place of one of these processes."""
    return event["name"].startswith("process_") and event["pid"] in pids


def _events(trace: Trace, since_ns: int, offset_ns: int) -> Iterator[Event]:
    for number, (name, part) in enumerate(trace.devices):
        pid = DEVICE_PID + number
        yield from _process(pid, f"discod (pid {trace.pid}) {name}", number)
        records = part.since(since_ns)
        for thread in sorted({record.thread for record in records}):
            yield _metadata("thread_name", pid, thread + 1, name=f"I/O thread {thread}")
        for record in records:
            yield _call(record, pid, offset_ns)
    yield from _waits(trace.waits.since(since_ns), offset_ns)


def _call(record: Record, pid: int, offset_ns: int) -> Event:
    seconds = (record.ended_ns - record.began_ns) / 1e9
    args = {
        "bytes": record.length,
        "blobs": record.blobs,
        "client pid": record.pid,
        "rank": record.rank,
        "queued ms": round((record.began_ns - record.queued_ns) / 1e6, 3),
        "outcome": _outcome(record.outcome),
    }
    if seconds > 0 and not record.outcome:
        args["GB/s"] = round(record.length / 1e9 / seconds, 3)
    name = _CALLS.get(Kind(record.kind), "call")
    return _span(name, "discod I/O", pid, record.thread + 1, record, offset_ns, args)


def _waits(records: Sequence[Record], offset_ns: int) -> Iterator[Event]:
    """The waits, in as many rows as overlap: those of a client's threads may.

    A client that has lost its connection may have told of one twice.
    """
    ends: dict[tuple[int, int], list[int]] = {}
    named: set[int] = set()
    for record in sorted(dict.fromkeys(records), key=lambda record: record.began_ns):
        pid = record.pid or HIDDEN_PID + record.rank + 1
        if pid not in named:
            named.add(pid)
            yield from _process(pid, _client(record), HIDDEN_PID + record.rank)
        name = _WAITS.get(Kind(record.kind), "wait")
        rows = ends.setdefault((pid, record.kind), [])
        row = next((i for i, end in enumerate(rows) if end <= record.began_ns), len(rows))
        tid = WAIT_TID + (record.kind - Kind.ROOM_WAIT) * ROWS + row
        if row == len(rows):
            rows.append(0)
            yield _metadata("thread_name", pid, tid, name=f"discod: {name}")
        rows[row] = record.ended_ns
        yield _span(name, "discod wait", pid, tid, record, offset_ns, {"rank": record.rank})


def _client(record: Record) -> str:
    rank = f" rank {record.rank}" if record.rank >= 0 else ""
    return f"trainer{rank} (pid {record.pid or 'unknown'})"


def _span(
    name: str,
    category: str,
    pid: int,
    tid: int,
    record: Record,
    offset_ns: int,
    args: Mapping[str, object],
) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": (record.began_ns + offset_ns) / 1e3,
        "dur": max(0, record.ended_ns - record.began_ns) / 1e3,
        "args": args,
    }


def _process(pid: int, name: str, place: int) -> Iterator[Event]:
    yield _metadata("process_name", pid, 0, name=name)
    yield _metadata("process_sort_index", pid, 0, sort_index=place)


def _metadata(what: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _outcome(outcome: int) -> str:
    if outcome == 0:
        return "done"
    return "failed" if outcome == FAILED else errno.errorcode.get(outcome, f"errno {outcome}")


def total_bytes(records: Iterable[Record]) -> int:
    """The bytes of calls that succeeded."""
    return sum(record.length for record in records if not record.outcome)
