"""A rank that is blocked in a read while others write at full rate: how long it waits.

By bare clients of a real daemon, so that nothing but the daemon and the disk is in the figures.
"""

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from discod.wire.messages import Done, Read, Write
from tests.benchmarks.frame import WrongBytes
from tests.benchmarks.spread import spread
from tests.helpers.daemon import Daemon
from tests.helpers.raw_client import RawClient

MIB = 1 << 20
WRITERS = 2
QUEUED = 8
"""Writes of each writer that the daemon has at any time."""
WRITE_BYTES = 16 * MIB
READ_BYTES = 1 * MIB
FULL_RATE_SECONDS = 30.0
"""Until the writers are at full rate; a disk that takes longer has failed."""


def measure(daemon: Daemon, threads: int, chunk_bytes: int, reads: int) -> dict[str, Any]:
    """Read ``reads`` times alone, and as often while writers keep the daemon busy.

    Args:
        daemon: It runs with ``threads`` and ``chunk_bytes``.
        threads: Its threads for I/O, of which writes leave one free.
        chunk_bytes: Most bytes of one transfer.
        reads: At least 2.

    Raises:
        WrongBytes: A read brought other bytes, or a request failed.
    """
    with _clients(daemon) as (reader, *writers):
        reader.arena[:READ_BYTES] = _pattern()
        token = _done(reader.write(0, 0, READ_BYTES)).checksum
        alone = [_read(reader, token) for _ in range(reads)]
        tasks = [_Writer(client) for client in writers]
        with ThreadPoolExecutor(WRITERS) as pool:
            running = [pool.submit(task.run) for task in tasks]
            try:
                for task in tasks:
                    if not task.at_full_rate.wait(FULL_RATE_SECONDS):
                        raise WrongBytes(f"no write was done within {FULL_RATE_SECONDS:.0f} s")
                began, before = time.perf_counter(), sum(task.done for task in tasks)
                latencies = [_read(reader, token) for _ in range(reads)]
                # A whole queue has passed: of fewer writes the rate would be chance.
                while sum(task.done for task in tasks) - before < QUEUED and not any(
                    future.done() for future in running
                ):
                    latencies.append(_read(reader, token))
                took, after = time.perf_counter() - began, sum(task.done for task in tasks)
            finally:
                for task in tasks:
                    task.stop.set()
            for future in running:
                future.result()
    written_chunks = (after - before) * WRITE_BYTES / chunk_bytes
    chunk_seconds = took * (threads - 1) / written_chunks
    own = statistics.median(alone)
    return {
        "threads": threads,
        "chunk_bytes": chunk_bytes,
        "writers": WRITERS,
        "queued": WRITERS * QUEUED,
        "write_bytes": WRITE_BYTES,
        "read_bytes": READ_BYTES,
        "reads": len(latencies),
        "latency": spread(latencies),
        "p99": statistics.quantiles(latencies, n=100)[-1],
        "alone": spread(alone),
        "chunk_seconds": chunk_seconds,
        "chunks": spread([max(0.0, latency - own) / chunk_seconds for latency in latencies]),
    }


class _Writer:
    """One client that has :data:`QUEUED` writes under way until it is told to stop."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._sent = 0
        self.done = 0
        self.at_full_rate = threading.Event()
        self.stop = threading.Event()

    def run(self) -> None:
        waiting = [self._send() for _ in range(QUEUED)]
        while not self.stop.is_set():
            _done(self._client.answer(waiting.pop(0)))
            self.done += 1
            if self.done == QUEUED:  # the extents exist now
                self.at_full_rate.set()
            waiting.append(self._send())
        for seq in waiting:
            _done(self._client.answer(seq))

    def _send(self) -> int:
        offset = self._sent % QUEUED * WRITE_BYTES
        self._sent += 1
        return self._client.send(Write, file=0, offset=offset, slot=0, length=WRITE_BYTES)


@contextmanager
def _clients(daemon: Daemon) -> Iterator[list[RawClient]]:
    """A reader, and the writers."""
    clients = [RawClient(daemon.socket_dir, arena_bytes=2 * READ_BYTES)]
    try:
        for _ in range(WRITERS):
            clients.append(RawClient(daemon.socket_dir, arena_bytes=WRITE_BYTES))
        yield clients
    finally:
        for client in clients:
            client.close()


def _pattern() -> bytes:
    return bytes(range(256)) * (READ_BYTES // 256)


def _read(client: RawClient, token: bytes) -> float:
    client.arena[READ_BYTES : 2 * READ_BYTES] = bytes(READ_BYTES)
    began = time.perf_counter()
    place = {"file": 0, "offset": 0, "slot": READ_BYTES, "length": READ_BYTES}
    _done(client.ask(Read, **place, checksum=token, urgent=True))
    took = time.perf_counter() - began
    if client.arena[READ_BYTES : 2 * READ_BYTES] != _pattern():
        raise WrongBytes("a blocked read brought other bytes")
    return took


def _done(reply: Any) -> Done:
    if not isinstance(reply, Done):
        raise WrongBytes(f"a request failed: {reply}")
    return reply
