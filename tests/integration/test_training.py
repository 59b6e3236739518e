"""Training through discod gives exactly plain checkpointing's result: one bit off fails."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disco_client
from tests.helpers.jobs import run_job
from tests.helpers.models import GPT, plain_checkpoint, reentrant_checkpoint
from tests.helpers.training import train

MODEL = {"layers": 8, "width": 64, "length": 32}
TRAIN: dict[str, Any] = {"steps": 2, "batch": 128, "length": 32}
HIDDEN_BYTES = 128 * 32 * 64 * 4
"""1 MiB, of many short sequences in a narrow model: little work for so many bytes."""

BFLOAT16_MODEL = {"layers": 3, "width": 32, "length": 32}
BFLOAT16_TRAIN = {"steps": 1, "batch": 256, "length": 32}
"""As many bytes. Matrix products in bfloat16 are slow on most CPUs."""

ORACLES = {"checkpoint": plain_checkpoint, "Disco": reentrant_checkpoint}
Attach = Callable[..., None]

FORMS = {"checkpoint": disco_client.checkpoint, "Disco": disco_client.Disco.apply}


def run(form: Callable[..., Any], autocast: bool) -> list[dict[str, Any]]:
    model, keywords = (BFLOAT16_MODEL, BFLOAT16_TRAIN) if autocast else (MODEL, TRAIN)
    torch.manual_seed(0)
    return train(GPT(form, **model), autocast=autocast, **keywords)


@functools.cache
def expected(form: str, autocast: bool) -> list[dict[str, Any]]:
    return run(ORACLES[form], autocast)


def check(form: str, blobs: int, autocast: bool) -> disco_client.Stats:
    """Train, compare every bit, and check that each blob was saved once and released."""
    history = run(FORMS[form], autocast)
    assert history == expected(form, autocast)
    stats = disco_client.stats()
    assert stats.live_blobs == 0
    assert stats.saved_bytes == len(history) * blobs * HIDDEN_BYTES
    return stats


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("arena", "does_not_fit"), [("10MiB", 0), ("4MiB", 5), ("2MiB", 7)], ids=["1x", "1/2", "least"]
)
def test_bit_equal_to_torch(attach: Attach, form: str, arena: str, does_not_fit: int) -> None:
    """Outputs, every gradient and the RNG state, with dropout and extra tensor arguments."""
    attach(arena=arena, min_bytes="256KiB")
    stats = check(form, blobs=9, autocast=False)  # 8 hidden states; the rotary input is shared
    if does_not_fit:
        assert stats.read_bytes >= TRAIN["steps"] * does_not_fit * HIDDEN_BYTES
        assert stats.last_cycle.written_bytes >= does_not_fit * HIDDEN_BYTES
    else:
        assert stats.last_cycle.written_bytes == 0
        assert stats.last_cycle.elided_bytes == stats.last_cycle.saved_bytes


@pytest.mark.parametrize("form", FORMS)
def test_bit_equal_under_autocast(attach: Attach, form: str) -> None:
    """The recomputation runs with the autocast state of the forward."""
    attach(arena="2MiB", min_bytes="256KiB")
    assert check(form, blobs=4, autocast=True).read_bytes > 0


@pytest.mark.parametrize(("ranks", "form"), [(2, "disco"), (4, "checkpoint")])
def test_ddp_ranks_share_one_daemon(daemon: Any, form: str, ranks: int) -> None:
    """Ranks of one job on one daemon neither mix blobs nor change a bit."""
    oracle = "plain" if form == "checkpoint" else "reentrant"
    settings = {
        "forms": [oracle, form],
        "model": MODEL | {"layers": 4},
        "train": TRAIN,
        "connect": {"socket_dir": str(daemon.socket_dir), "arena": "2MiB", "min_bytes": "256KiB"},
    }
    for report in run_job(ranks, settings):
        assert report["history"][form] == report["history"][oracle]
        assert report["live_blobs"] == 0
        assert report["read_bytes"] > 0
