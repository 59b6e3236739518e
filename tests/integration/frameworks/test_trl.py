"""TRL: its real trainers, with its own switches for checkpointing and offloading."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.models import activation_offloading

import disco_client
from disco_client.patches import transformers as disco_transformers
from disco_client.patches import trl as disco_trl
from disco_client.patches.transformers import DiscodCallback
from tests.helpers.pages import run_page
from tests.helpers.tiny_models import (
    LAYERS,
    assert_same,
    batch,
    tiny,
    tokenizer,
    trainer_options,
)

STEPS = 2
MICRO_STEPS = 2
FORWARDS = STEPS * MICRO_STEPS

pytestmark = [
    pytest.mark.usefixtures("attached", "patched"),
    # TRL uses names that transformers 5 has deprecated.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
]


@pytest.fixture
def patched() -> Iterator[None]:
    """Both switches can go to discod while the test runs."""
    disco_transformers.enable()
    disco_trl.enable()
    yield
    disco_trl.disable()
    disco_transformers.disable()


def saved() -> int:
    return disco_client.stats().saved_blobs


def words(seed: int, count: int) -> str:
    return " ".join(f"w{3 + (seed * 7 + i * 5) % 93}" for i in range(count))


def texts() -> Dataset:
    return Dataset.from_list([{"text": words(row, 40)} for row in range(8)])


def preferences() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": words(row, 8), "chosen": words(row + 3, 30), "rejected": words(row + 5, 24)}
            for row in range(8)
        ]
    )


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train(kind: str, path: Path, adapters: bool, *callbacks: Any, **options: Any) -> Any:
    """A trainer of ``kind``, after ``STEPS`` steps."""
    config, trainer_class, dataset = {
        "sft": (SFTConfig, SFTTrainer, texts()),
        "dpo": (DPOConfig, DPOTrainer, preferences()),
    }[kind]
    more = {"ref_model": tiny(seed=1)} if kind == "dpo" and not adapters else {}
    torch.manual_seed(0)
    trainer = trainer_class(
        tiny(),
        args=config(**trainer_options(path, STEPS, MICRO_STEPS) | options),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
        callbacks=list(callbacks),
        **more,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_both_switches_reach_the_same_weights(kind: str, adapters: bool, tmp_path: Path) -> None:
    """The whole way of a user, with a reference model's forward before each backward in DPO."""
    layers = LAYERS - adapters  # autograd holds the first one's input, which PEFT gives a gradient
    plain = dict(train(kind, tmp_path, adapters).model.state_dict())
    assert saved() == 0

    key = {"gradient_checkpointing_kwargs": {"offload": "disk"}}
    checkpointed = train(kind, tmp_path, adapters, **key)
    assert_same(dict(checkpointed.model.state_dict()), plain)
    assert saved() == layers * FORWARDS
    checkpointed.evaluate()
    assert saved() == layers * FORWARDS

    switch = {"gradient_checkpointing": False, "activation_offloading": True}
    offloaded = train(kind, tmp_path, adapters, **switch)
    assert_same(dict(offloaded.model.state_dict()), plain)
    activations = saved() - layers * FORWARDS
    assert activations > 10 * layers * FORWARDS
    offloaded.evaluate()
    assert saved() == layers * FORWARDS + activations
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("options", [{}, {"offload": "disk"}], ids=["", "key"])
def test_both_switches_together(tmp_path: Path, options: dict[str, str]) -> None:
    """Else the recomputed activations would go to disk and come back at once."""
    plain = train("sft", tmp_path, False)
    both = train(
        "sft",
        tmp_path,
        False,
        activation_offloading=True,
        gradient_checkpointing_kwargs=options or None,
    )
    assert_same(dict(both.model.state_dict()), dict(plain.model.state_dict()))
    outside = 3  # of the layers: around the last norm, and in the loss
    assert saved() == (LAYERS + outside) * FORWARDS
    assert disco_client.stats().live_blobs == 0


def test_options_that_the_reference_models_turn_gives_back(tmp_path: Path) -> None:
    """TRL turns checkpointing on again with the whole dict, which torch would choke on."""
    options = {"offload": "disk", "every_n_layers": 2}
    train("dpo", tmp_path, True, gradient_checkpointing_kwargs=options)
    assert saved() == FORWARDS  # layer 2; layer 0 has an input that autograd holds


def test_selective_checkpointing(tmp_path: Path) -> None:
    """TRL's own policy keeps what attention gives; only the layer inputs are to be offloaded."""
    results = []
    for more in ({}, {"offload": "disk"}):
        options = {"selective": True} | more
        trainer = train("sft", tmp_path, False, gradient_checkpointing_kwargs=options)
        results.append(dict(trainer.model.state_dict()))
    assert_same(*results)
    assert saved() == LAYERS * FORWARDS


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_callback_needs_no_key(kind: str, tmp_path: Path) -> None:
    """Else TRL's trainers would need other words than transformers' own."""
    train(kind, tmp_path, False, DiscodCallback())
    assert saved() == LAYERS * FORWARDS


def test_weights_are_not_offloaded() -> None:
    """Else every step would write the model to disk."""
    model = tiny()
    with activation_offloading.get_act_offloading_ctx_manager(model):
        model(input_ids=batch()["input_ids"][:1, :2]).logits.sum().backward()
    assert saved() == 0  # all but weights is too small


def test_the_output_head_stays_out_of_it() -> None:
    """TRL spares it because backward begins there: its input would come back at once."""
    counts = []
    for context in (activation_offloading.get_act_offloading_ctx_manager, disco_client.offload):
        model, before = tiny(), saved()
        with context(model):
            logits = model(batch()["input_ids"]).logits
        logits.sum().backward()
        counts.append(saved() - before)
    assert counts[0] == counts[1] - 1


def test_enabling_twice_and_disabling_restore_the_very_originals() -> None:
    """Else patches would stack, or leave something of themselves behind."""
    changed = dict(vars(activation_offloading))
    disco_trl.enable()
    assert dict(vars(activation_offloading)) == changed
    disco_trl.disable()
    original = activation_offloading.OffloadActivations
    assert original.__module__ == activation_offloading.__name__
    disco_trl.disable()
    disco_trl.enable()
    assert activation_offloading.OffloadActivations is not original
    disco_trl.disable()
    assert activation_offloading.OffloadActivations is original


def test_one_warning_from_each_patch_that_moved_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else users would train without any offload, sure that they have it."""
    train("sft", tmp_path, False)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("disco_client") and record.levelno >= logging.WARNING
    ]
    assert len(warnings) == 2
    assert '"offload": "disk"' in warnings[0]
    assert "activation_offloading=True" in warnings[1]


@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # the page is for GPUs
def test_the_page_works_as_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first thing that a user of TRL tries fails."""
    on_the_cpu = functools.partial(SFTConfig, use_cpu=True)  # which TRL has to be told
    monkeypatch.setattr(trl, "SFTConfig", on_the_cpu)
    run_page(
        "frameworks/trl.md",
        model=tiny(),
        dataset=texts(),
        tokenizer=tokenizer(),
        output_dir=str(tmp_path),
    )
    assert saved() >= LAYERS
