"""Many small blobs side by side, which the daemon reads and writes together, through a real one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from discod.wire.messages import Cancel, Done, Failed, Failure, Read, Write
from tests.helpers.daemon import Daemon
from tests.helpers.faults import Rules
from tests.helpers.raw_client import MIB, RawClient

SMALL = 16 << 10
COUNT = 256
HALF = SMALL * COUNT
"""The blobs are written from the arena's first half, and read into its second one."""


class Burst:
    """Random blobs, all written in one burst.

    Attributes:
        data: What is in them.
        answers: The daemon's, one for each.
    """

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.data = os.urandom(HALF)
        client.arena[:HALF] = self.data
        seqs = [client.send(Write, **self.place(index)) for index in range(COUNT)]
        self.answers = [client.answer(seq) for seq in seqs]

    def place(self, index: int, slot: int = 0) -> dict[str, int]:
        at = index * SMALL
        return {"file": 0, "offset": at, "slot": slot + at, "length": SMALL}

    def read(self) -> dict[int, bytes]:
        """Those that were written, newest first, as a backward pass does: what came back."""
        written = [i for i, answer in enumerate(self.answers) if isinstance(answer, Done)]
        seqs = {
            index: self.client.send(
                Read,
                **self.place(index, HALF),
                checksum=self.answers[index].checksum,
                urgent=False,
            )
            for index in reversed(written)
        }
        for index, seq in seqs.items():
            answer = self.client.answer(seq)
            assert isinstance(answer, Done), f"blob {index}: {answer}"
        return {index: self.part(self.client.arena[HALF : 2 * HALF], index) for index in written}

    def part(self, whole: bytes, index: int) -> bytes:
        return whole[index * SMALL : (index + 1) * SMALL]


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    return Rules(tmp_path / "rules")


def test_every_byte_comes_back(
    start_daemon: Callable[..., Daemon], raw_client: Callable[..., RawClient]
) -> None:
    """A blob would get its neighbour's bytes, or the checksum of another one."""
    burst = Burst(raw_client(start_daemon("--checksum", "full"), 2 * HALF))
    back = burst.read()
    assert len({answer.checksum for answer in burst.answers}) == COUNT
    assert b"".join(back[index] for index in range(COUNT)) == burst.data


@pytest.mark.parametrize("fault", ["EIO", "short", "nothing"])
def test_faults_stay_with_those_they_hit(
    fault: str,
    start_daemon: Callable[..., Daemon],
    raw_client: Callable[..., RawClient],
    rules: Rules,
) -> None:
    """One failing call would lose blobs that were not in it, or call lost ones written."""
    daemon = start_daemon("--checksum", "full", env=rules.environment)
    client = raw_client(daemon, 2 * HALF)
    rules.set(f"pwritev {fault} every=3", f"preadv {fault}")
    burst = Burst(client)
    if fault != "short":
        rules.clear()
    failed = [answer for answer in burst.answers if not isinstance(answer, Done)]
    assert all(
        isinstance(answer, Failed) and (answer.kind, answer.errno) == (Failure.IO, errno.EIO)
        for answer in failed
    )
    assert not failed or fault != "short"
    back = burst.read()
    assert len(back) > COUNT // 3, "no call was tried again for each"
    for index, data in back.items():
        assert data == burst.part(burst.data, index)


def test_cancelled_ones_in_a_burst(
    start_daemon: Callable[..., Daemon], raw_client: Callable[..., RawClient]
) -> None:
    """A cancellation would hit a neighbour, or a request be answered twice or never."""
    client = raw_client(start_daemon(), MIB)
    writes = []
    for index in range(32):
        seq = client.send(Write, file=0, offset=index * SMALL, slot=index * SMALL, length=SMALL)
        writes.append(seq)
        if index % 2:
            client.send(Cancel, target=seq)
    for index, seq in enumerate(writes):
        answer = client.answer(seq)
        if not (index % 2 and isinstance(answer, Failed)):
            assert isinstance(answer, Done), f"write {index}: {answer}"
