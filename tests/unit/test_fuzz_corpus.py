"""What fuzzing has found so far, run again in a second (``python -m tests.fuzz`` finds more)."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import CORPUS, TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target: str) -> None:
    """An input that once broke an invariant, or reached a rare branch, would break one now."""
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) >= 10, "the corpus is gone"
    for path in inputs:
        try:
            TARGETS[target](path.read_bytes())
        except BaseException as error:
            error.add_note(f"input: {path.name}")
            raise


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.binary(max_size=200))
def test_other_inputs(target: str, data: bytes) -> None:
    """The invariants would hold for the corpus alone."""
    TARGETS[target](data)


def test_mixtures_of_the_corpus() -> None:
    """As above, for what random bytes do not reach."""
    chance = random.Random(5)
    for target, run in TARGETS.items():
        inputs = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
        for _ in range(200):
            one, other = chance.choice(inputs), chance.choice(inputs)
            run(one[: chance.randrange(len(one) + 1)] + other[chance.randrange(len(other) + 1) :])


def test_corpus_is_small() -> None:
    """The repository would fill with what a fuzzer kept."""
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) < 300
    assert sum(path.stat().st_size for path in files) < 200_000
