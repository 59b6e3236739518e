"""Proofs look at the first optimizer step, together with whatever else does."""

import logging
from collections.abc import Iterator

import pytest
import torch

from disco_client.patches.proof import Proof


@pytest.fixture
def proofs() -> Iterator[list[Proof]]:
    """Two, as when two patches are enabled."""
    both = [Proof(name, f"Is {name} on?") for name in ("one", "other")]
    yield both
    for proof in both:
        proof.end()


def step() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight]).step()


def test_two_proofs_do_not_break_the_step(
    proofs: list[Proof], caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that removes itself while torch iterates over the hooks ends a training at once."""
    for proof in proofs:
        proof.begin()
    with caplog.at_level(logging.WARNING):
        step()
        step()
        for proof in proofs:
            proof.check()
    assert [record.args[0] for record in caplog.records] == ["one", "other"]  # each of them once
    assert "Is one on?" in caplog.text


def test_a_remedy_for_one_time(proofs: list[Proof], caplog: pytest.LogCaptureFixture) -> None:
    """A callback's advice must not be given to who enables the patch by hand later."""
    proof = proofs[0]
    for remedy, expected in (("Look there.", "Look there."), (None, "Is one on?")):
        proof.begin(remedy)
        step()
        assert expected in caplog.text
        caplog.clear()
