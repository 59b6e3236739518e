"""The soak in a few seconds, and what it would say of a leak."""

from pathlib import Path

import pytest

from tests.soak.flat import climb, growth
from tests.soak.procfs import Sample
from tests.soak.report import Outcome, as_json, picture, problems, table
from tests.soak.run import Plan, soak

MIB = 1 << 20


def samples(leak_bytes: float = 0.0, fds: int = 0) -> list[Sample]:
    """An hour of samples with peaks, growing by ``leak_bytes`` and ``fds`` over all of it."""
    return [
        Sample(
            seconds=float(second),
            anon_bytes=round(100 * MIB + second % 7 * 8 * MIB + leak_bytes * second / 3600),
            shared_bytes=0,
            fds=20 + second % 5 + fds * second // 3600,
            threads=5,
            maps=300,
        )
        for second in range(0, 3600, 10)
    ]


def test_it_runs(tmp_path: Path) -> None:
    """The long run would fail at its end, or find nothing because nothing is done in it."""
    plan = Plan(seconds=4, arena_bytes=16 * MIB, most_bytes=4 * MIB, restart_seconds=2)
    outcome = soak(plan, tmp_path)
    assert outcome.left == {}
    assert outcome.restarts >= 1
    assert outcome.visits >= 1
    for name in ("trainer 0", "trainer 1"):
        done = outcome.done[name]
        assert done["wrong"] == 0
        assert done["live_blobs"] == 0
        assert min(done["saved"], done["verified"], done["written_bytes"]) > 0
    assert "trainer 1 | memory" in table(outcome)
    assert '"restarts"' in as_json(plan, outcome)
    assert picture(outcome).count("<polyline") > 4


@pytest.mark.parametrize(
    ("process", "leak_bytes", "fds", "said"),
    [
        ("daemon 0", 0.0, 0, None),
        ("daemon 0", 6.0 * MIB, 0, "daemon 0: anon_bytes"),
        ("trainer 1", 6.0 * MIB, 0, None),
        ("trainer 1", 30.0 * MIB, 0, "trainer 1: anon_bytes"),
        ("trainer 1", 0.0, 20, "trainer 1: fds"),
    ],
)
def test_a_leak_is_found(process: str, leak_bytes: float, fds: int, said: str | None) -> None:
    """A soak that cannot fail would prove nothing; one that fails of peaks would be ignored."""
    found = problems(Outcome(samples={process: samples(leak_bytes, fds)}))
    assert [text.rpartition(" grew")[0] for text in found] == ([] if said is None else [said])


def test_a_wrong_result_and_leftovers_are_found() -> None:
    """Data could be wrong in silence at the end of an hour."""
    outcome = Outcome(
        done={"trainer 0": {"wrong": 1, "live_blobs": 2}, "visitors": {"live_blobs": 3}},
        left={"disk_used_bytes": 4096},
    )
    assert len(problems(outcome)) == 3


def test_flatness() -> None:
    """Peaks and a warm-up would count as growth."""
    warm_up = [(float(x), 10.0 * x) for x in range(25)]
    assert growth(warm_up + [(float(x), 250.0 + x % 2 * 100) for x in range(25, 100)]) == 0
    assert growth([(float(x), 2.0 * x) for x in range(100)]) == pytest.approx(2 * 74)
    assert growth([]) == 0.0
    assert climb([9] * 25 + [5, 6, 5] * 25) == 0
    assert climb(list(range(100))) == 50
