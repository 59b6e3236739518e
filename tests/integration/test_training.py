"""Training through discod gives exactly plain checkpointing's result: one bit off fails."""

from collections.abc import Callable
from typing import Any

import disco_client
import pytest
import torch

from tests.helpers.jobs import run_job
from tests.helpers.models import GPT, plain_checkpoint, reentrant_checkpoint
from tests.helpers.training import train

MODEL = {"layers": 12, "width": 128, "length": 1024}
TRAIN: dict[str, Any] = {"steps": 3, "batch": 4, "length": 1024}
HIDDEN_BYTES = 4 * 1024 * 128 * 4
BLOBS = 13
"""Each layer's hidden states, and the rotary input that all layers share."""

ARENAS = {"1x": BLOBS * HIDDEN_BYTES, "1/4": BLOBS * HIDDEN_BYTES // 4, "least": 2 * HIDDEN_BYTES}

Attach = Callable[..., None]


def run(form: Callable[..., Any], **kwargs: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return train(GPT(form, **MODEL), **TRAIN, **kwargs)


@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("form", "oracle"),
    [
        (disco_client.checkpoint, plain_checkpoint),
        (disco_client.Disco.apply, reentrant_checkpoint),
    ],
    ids=["checkpoint", "Disco"],
)
def test_bit_equal_to_torch(
    attach: Attach, form: Any, oracle: Any, autocast: bool, arena: str
) -> None:
    """Outputs, every gradient and the RNG state: dropout, autocast, extra tensor arguments."""
    expected = run(oracle, autocast=autocast)
    attach(arena=ARENAS[arena], min_bytes="256KiB")
    assert run(form, autocast=autocast) == expected
    stats = disco_client.stats()
    assert stats.live_blobs == 0
    assert stats.saved_bytes == TRAIN["steps"] * BLOBS * HIDDEN_BYTES
    if arena == "1x":
        assert stats.written_bytes == 0
    else:
        assert stats.read_bytes > 0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["checkpoint", "disco"])
def test_ddp_ranks_share_one_daemon(daemon: Any, form: str, ranks: int) -> None:
    """Ranks of one job on one daemon neither mix blobs nor change a bit."""
    settings = {"model": MODEL | {"layers": 6}, "train": TRAIN | {"batch": 1, "steps": 2}}
    oracle = "plain" if form == "checkpoint" else "reentrant"
    expected = run_job(ranks, settings | {"form": oracle})
    connect = {"socket_dir": str(daemon.socket_dir), "arena": "2MiB", "min_bytes": "256KiB"}
    reports = run_job(ranks, settings | {"form": form, "connect": connect})
    for report, plain in zip(reports, expected, strict=True):
        assert report["history"] == plain["history"]
        assert report["live_blobs"] == 0
        assert report["read_bytes"] > 0
