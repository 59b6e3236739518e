"""The status as Prometheus metrics: their names, labels and help texts.

Only loaded with ``--metrics``. Names, base units and ``_total`` are as Prometheus has them
(https://prometheus.io/docs/practices/naming/). Labels are bounded: directories, GPUs and ranks
(:mod:`discod.ranks`), no pids. The server is :mod:`discod.metrics_server`; the dashboard and the
alert rules in ``docs/grafana`` use these names, which a test compares.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from discod.status import Snapshot, Status
from discod.wire.messages import Failure, WaitFor

_WRITE_FAILURES = (Failure.IO, Failure.DISK_FULL, Failure.OVER_BUDGET, Failure.OUT_OF_USE)
_READ_FAILURES = (Failure.IO, Failure.CORRUPT)


class Collector:
    """One snapshot, for a registry of prometheus_client."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        status = self._snapshot.status
        yield from _daemon(status)
        yield from _scratch(status["scratch"])
        yield from _ranks(self._snapshot)
        yield from _gpus(status["gpus"])


def _daemon(status: Status) -> Iterator[Metric]:
    info = _gauge("discod_build_info", "1, with the daemon's version.", "version")
    info.add_metric([status["version"]], 1)
    yield info
    for name, text, value in (
        ("discod_ram_limit_bytes", "Most memory for all arenas (--ram).", status["ram_bytes"]),
        ("discod_ram_reserved_bytes", "Memory of all arenas.", status["ram_used_bytes"]),
        ("discod_disk_limit_bytes", "Most scratch space (--disk).", status["disk_bytes"]),
        ("discod_disk_reserved_bytes", "Scratch space in use.", status["disk_used_bytes"]),
        (
            "discod_written_last_day_bytes",
            "Written in the last 24 hours, or since the start.",
            status["written_last_day_bytes"],
        ),
        ("discod_clients", "Clients that are attached.", len(status["clients"])),
    ):
        yield GaugeMetricFamily(name, text, value)
    if status["write_budget_bytes"] is None:
        return
    for name, text, key in (
        ("bytes", "Most that may be written in the window (--write-budget).", "bytes"),
        ("window_seconds", "The window's length.", "seconds"),
        ("used_bytes", "Written in the window.", "used_bytes"),
        ("held_writes", "Writes that wait for room in the budget.", "held"),
    ):
        value = status[f"write_budget_{key}"]
        yield GaugeMetricFamily(f"discod_write_budget_{name}", text, value)


def _scratch(directories: list[Status]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "discod_scratch_info",
        "1, with the block device and the type of the file system.",
        labels=["scratch", "device", "fs_type"],
    )
    failures = CounterMetricFamily(
        "discod_scratch_failures",
        "Requests that failed; cancelled ones do not count.",
        labels=["scratch", "operation", "kind"],
    )
    for one in directories:
        info.add_metric([one["path"], one["device_name"] or one["device"], one["fs_type"]], 1)
        for operation, known in (("write", _WRITE_FAILURES), ("read", _READ_FAILURES)):
            # From 0, so that the first one is an increase.
            counts = dict.fromkeys(map(str, known), 0) | one[f"{operation}_failures"]
            for kind, count in counts.items():
                failures.add_metric([one["path"], operation, kind], count)
    yield info
    yield failures
    for name, text, key, make in (
        ("in_use", "1: it may be written to; 0: its device has failed.", "in_use", _gauge),
        ("direct", "1: O_DIRECT; 0: buffered, because O_DIRECT fails.", "direct", _gauge),
        ("used_bytes", "Space of the files of all clients.", "used_bytes", _gauge),
        ("free_bytes", "What its file system has free for users.", "free_bytes", _gauge),
        ("written_bytes", "Written for clients.", "written_bytes", _counter),
        ("read_bytes", "Read for clients.", "read_bytes", _counter),
        ("writes", "Write requests that succeeded.", "writes", _counter),
        ("reads", "Read requests that succeeded.", "reads", _counter),
    ):
        family = make(f"discod_scratch_{name}", text, "scratch")
        for one in directories:
            family.add_metric([one["path"]], float(one[key]))
        yield family


def _ranks(snapshot: Snapshot) -> Iterator[Metric]:
    ranks = sorted(snapshot.ranks.items())
    for name, text in (
        ("written_bytes", "Written to disk."),
        ("read_bytes", "Read back from disk."),
        ("saved_bytes", "Copied into the arenas, as the clients report."),
        ("elided_bytes", "Freed without having been written, as the clients report."),
        ("loads", "Loads, as the clients report."),
        ("cycles", "Forward and backward passes that ended, as the clients report."),
    ):
        family = _counter(f"discod_rank_{name}", text, "rank")
        for rank, totals in ranks:
            family.add_metric([rank], totals[name])
        yield family
    waits = _counter("discod_rank_waits", "Calls that had to wait.", "rank", "reason")
    seconds = _counter(
        "discod_rank_wait_seconds",
        "Time that calls waited: for room in the arena, for a read, for copies off a device.",
        *("rank", "reason"),
    )
    for rank, totals in ranks:
        for what in WaitFor:
            reason = what.name.lower()
            waits.add_metric([rank, reason], totals[f"{reason}_waits"])
            seconds.add_metric([rank, reason], totals[f"{reason}_wait_ns"] / 1e9)
    yield waits
    yield seconds
    for name, text, value in _NOW:
        now = _gauge(f"discod_rank_{name}", text, "rank")
        for rank, _ in ranks:
            now.add_metric([rank], sum(map(value, snapshot.clients_of(rank))))
        yield now


_NOW: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    ("clients", "Clients that are attached.", lambda client: 1),
    ("arena_bytes", "Size of their arenas.", lambda client: client["arena_bytes"]),
    ("disk_bytes", "Scratch space that they use.", lambda client: client["disk_bytes"]),
    ("requests_in_flight", "Requests not answered yet.", lambda client: client["in_flight"]),
)


def _gpus(gpus: list[Status]) -> Iterator[Metric]:
    copied = _counter("discod_gpu_copied_bytes", "Copied by the GPU's process.", "gpu")
    up = _gauge("discod_gpu_process_up", "Whether the GPU's process runs.", "gpu")
    for gpu in gpus:
        copied.add_metric([gpu["uuid"]], gpu["copied_bytes"])
        up.add_metric([gpu["uuid"]], float(bool(gpu["pid"])))
    yield copied
    yield up


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Shown as ``name_total``."""
    return CounterMetricFamily(name, text, labels=labels)
