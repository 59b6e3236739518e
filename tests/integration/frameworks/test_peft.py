"""PEFT: adapters on a frozen model, through the patch of transformers alone."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import disco_client
from disco_client.patches import transformers as disco_transformers
from disco_client.patches.transformers import DiscodCallback
from tests.helpers.pages import run_page
from tests.helpers.tiny_models import (
    LAYERS,
    assert_same,
    batch,
    gradients,
    layer_inputs,
    rows,
    tiny,
    trainer_options,
)

KINDS = {"llama": 0, "gpt2": 1}
"""And the blobs that are not one layer's input."""

STORED = LAYERS - 1
"""Of a Llama whose embeddings are made to require a gradient: autograd holds the first input."""

pytestmark = [
    pytest.mark.usefixtures("attached", "patched"),
    # PEFT uses names that transformers 5 has deprecated.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture
def patched() -> Iterator[None]:
    """The key is known while the test runs."""
    disco_transformers.enable()
    yield
    disco_transformers.disable()


def saved() -> int:
    return disco_client.stats().saved_blobs


def adapted(kind: str = "llama", **settings: Any) -> Any:
    """A model in training mode whose adapters do something; equal for equal arguments."""
    model = tiny(kind)
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    settings = {"r": 4, "lora_dropout": 0.1, "target_modules": targets} | settings
    model = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            init_lora_weights=False,
            fan_in_fan_out=kind == "gpt2",
            **settings,
        ),
    )
    return model.train()


def adapter_gradients(model: Any) -> dict[str, Any]:
    """Of the parameters that are trained, all of which must have one."""
    found = {name: grad for name, grad in gradients(model, 2).items() if grad is not None}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(found) == sorted(trained)
    return found


@pytest.mark.parametrize("form", ["input grads", "frozen input", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_get_the_gradients_of_torch(kind: str, form: str) -> None:
    """A checkpoint whose input needs no gradient is where adapters have silently not trained."""
    results = []
    for offload in (False, "disk"):
        model = adapted(kind)
        options = {"use_reentrant": form == "reentrant"}
        model.activation_checkpointing_enable(options, offload=offload)
        if form == "frozen input":
            model.disable_input_require_grads()
        results.append(adapter_gradients(model))
    assert_same(*results)
    layers = STORED if kind == "llama" and form != "frozen input" else LAYERS
    assert saved() == 2 * (layers + KINDS[kind])
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("input_grads", [False, True])
def test_layer_inputs_leave_the_memory(input_grads: bool) -> None:
    """What the page says of ``enable_input_require_grads``; else nothing would be won."""
    model = adapted()
    model.activation_checkpointing_enable(offload="disk")
    if not input_grads:
        model.disable_input_require_grads()
    inputs = layer_inputs(model)
    output = model(**batch())
    assert [one.expired() for one in inputs] == [not input_grads] + [True] * (LAYERS - 1)
    del output


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch's
def test_reentrant_without_input_grads_raises() -> None:
    """Else a run would go on for days and train nothing."""
    model = adapted()
    model.activation_checkpointing_enable({"use_reentrant": True}, offload="disk")
    model.disable_input_require_grads()
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(**batch()).loss.backward()
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"alora_invocation_tokens": [5]}, {"modules_to_save": ["lm_head"]}],
    ids=lambda settings: next(iter(settings)),
)
def test_kinds_of_adapters(settings: dict[str, Any]) -> None:
    """Activated LoRA injects arguments by hooks, which must be there in the recomputation too."""
    results = []
    for offload in (False, "disk"):
        model = adapted(**settings)
        model.activation_checkpointing_enable(offload=offload)
        results.append(adapter_gradients(model))
    assert_same(*results)
    assert saved() == 2 * STORED


def test_a_model_that_checkpoints_already_is_adapted() -> None:
    """Else the order of PEFT and checkpointing would decide whether anything is offloaded."""
    results = []
    for offload in (False, "disk"):
        model = tiny()
        model.activation_checkpointing_enable(offload=offload)
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        results.append(adapter_gradients(get_peft_model(model, config)))
    assert_same(*results)
    assert saved() == 2 * STORED


def test_adapters_are_copied_saved_and_merged(tmp_path: Path) -> None:
    """Else the adapters of a run could not be kept, or would have other names."""
    model = adapted()
    keys = list(model.state_dict())
    model.activation_checkpointing_enable(offload="disk")
    output = model(**batch())
    twin = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    output.loss.backward()
    assert list(model.state_dict()) == keys
    assert_same(dict(PeftModel.from_pretrained(tiny(), tmp_path).state_dict()), model.state_dict())
    model.zero_grad()
    assert_same(adapter_gradients(twin), adapter_gradients(model))
    before = saved()
    model.merge_and_unload().generate(batch()["input_ids"][:1], max_new_tokens=8, do_sample=False)
    assert saved() == before


@pytest.mark.parametrize("way", ["key", "callback"])
def test_a_trainer_reaches_the_same_weights(tmp_path: Path, way: str) -> None:
    """The whole way of a user who trains adapters."""
    options = {"activation_checkpointing_kwargs": {"offload": "disk"}} if way == "key" else {}
    callbacks = [DiscodCallback()] if way == "callback" else []
    results = []
    for more, told in (({}, []), (options, callbacks)):
        model = adapted()
        arguments = TrainingArguments(
            **trainer_options(tmp_path, 2, 2), activation_checkpointing=True, **more
        )
        Trainer(model, arguments, train_dataset=rows(2), callbacks=told).train()
        results.append(dict(model.state_dict()))
    assert_same(*results)
    assert saved() == 2 * 2 * STORED
    assert disco_client.stats().live_blobs == 0


def test_the_page_works_as_it_is_copied() -> None:
    """Else the first thing that a user of PEFT tries fails."""
    names = run_page("frameworks/peft.md", model=tiny())
    gradients(names["model"], 1)
    assert saved() == STORED
