"""transformers: real models, tiny, through their own options and the real ``Trainer``."""

import copy
import functools
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import disco_client
from disco_client.errors import UsageError
from disco_client.patches import torch as torch_patch
from disco_client.patches import transformers as disco_transformers
from disco_client.patches.transformers import DiscodCallback
from tests.helpers.pages import run_page
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    LAYERS,
    assert_same,
    batch,
    gradients,
    layer_inputs,
    rows,
    tiny,
    trainer_options,
)

Attach = Callable[..., None]
STEPS = 2
MICRO_STEPS = 2
"""Of gradient accumulation, a step."""

pytestmark = pytest.mark.usefixtures("attached")


@pytest.fixture
def patched() -> Iterator[None]:
    """The key is known while the test runs."""
    disco_transformers.enable()
    yield
    disco_transformers.disable()


def saved() -> int:
    return disco_client.stats().saved_blobs


def train(model: nn.Module, path: Path, callbacks: Any = (), **options: Any) -> Trainer:
    """A training of ``STEPS`` steps, over."""
    arguments = TrainingArguments(
        **trainer_options(path, STEPS, MICRO_STEPS) | {"activation_checkpointing": True} | options
    )
    trainer = Trainer(model, arguments, train_dataset=rows(MICRO_STEPS), callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.usefixtures("patched")
def test_gradients_are_those_of_torch(kind: str, reentrant: bool) -> None:
    """Else a model trains to other weights than without discod, or stores what it need not."""
    options = {"use_reentrant": reentrant}
    plain = tiny(kind)
    plain.activation_checkpointing_enable(options)
    expected = gradients(plain, MICRO_STEPS)
    assert saved() == 0

    model = tiny(kind)
    keys = list(model.state_dict())
    model.activation_checkpointing_enable(options, offload="disk")
    assert_same(gradients(model, MICRO_STEPS), expected)
    architecture = ARCHITECTURES[kind]
    shared = architecture.shared + reentrant * architecture.reentrant_only
    assert saved() == (architecture.layers + shared) * MICRO_STEPS
    assert list(model.state_dict()) == keys
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.usefixtures("patched")
def test_layer_inputs_leave_the_memory(kind: str, reentrant: bool) -> None:
    """Else a copy would be on disk, and nothing won by it."""
    for offload in (False, "disk"):
        model = tiny(kind)
        model.activation_checkpointing_enable({"use_reentrant": reentrant}, offload=offload)
        inputs = layer_inputs(model)
        output = model(**batch())
        assert len(inputs) == ARCHITECTURES[kind].layers
        assert [one.expired() for one in inputs] == [bool(offload)] * len(inputs)
        del output


@pytest.mark.usefixtures("patched")
def test_several_forwards_before_one_backward() -> None:
    """Else two batches of one loss, as in contrastive losses, would be mixed up."""
    results = []
    for how in ({}, {"offload": "disk"}):
        model = tiny()
        model.activation_checkpointing_enable(**how)
        torch.manual_seed(7)
        losses = [model(**batch(seed)).loss for seed in range(3)]
        sum(losses[1:], losses[0] * 2).backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*results)
    assert saved() == 3 * LAYERS
    assert disco_client.stats().live_blobs == 0


@pytest.mark.usefixtures("patched")
def test_a_forward_without_backward_leaves_nothing() -> None:
    """Else a step that is skipped, for a NaN say, would fill the disk or spoil the next one."""
    model = tiny()
    model.activation_checkpointing_enable(offload="disk")
    output = model(**batch(3))
    assert disco_client.stats().live_blobs == LAYERS
    del output
    assert disco_client.stats().live_blobs == 0
    plain = tiny()
    plain.activation_checkpointing_enable()
    assert_same(gradients(model, MICRO_STEPS), gradients(plain, MICRO_STEPS))


@pytest.mark.usefixtures("patched")
def test_a_model_is_copied_and_saved_while_it_offloads(tmp_path: Path) -> None:
    """Else EMA copies, checkpoints of the model, or reference models of RL would not work."""
    model = tiny()
    model.activation_checkpointing_enable(offload="disk")
    output = model(**batch())
    twin = copy.deepcopy(model)
    model.disable_input_require_grads()  # of transformers, and cannot be pickled
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    model.save_pretrained(tmp_path)
    output.loss.backward()
    model.zero_grad()
    expected = gradients(model, MICRO_STEPS)
    before = saved()
    assert_same(gradients(twin, MICRO_STEPS), expected)
    assert_same(gradients(loaded, MICRO_STEPS), expected)
    assert saved() == before + 2 * LAYERS * MICRO_STEPS
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(reloaded.state_dict()), dict(model.state_dict()))


@pytest.mark.usefixtures("patched")
def test_the_other_options_keep_working() -> None:
    """Else ``every_n_layers`` would checkpoint all layers, or torch's options would be lost."""
    options = {"preserve_rng_state": False, "determinism_check": "none"}
    model = tiny()
    model.activation_checkpointing_enable(options, every_n_layers=2, offload="disk")
    plain = tiny()
    plain.activation_checkpointing_enable(every_n_layers=2)
    model.config._attn_implementation = plain.config._attn_implementation = "eager"
    for layer in (*model.model.layers, *plain.model.layers):
        layer.self_attn.attention_dropout = 0.0
    assert_same(gradients(model, MICRO_STEPS), gradients(plain, MICRO_STEPS))
    assert saved() == 2 * MICRO_STEPS  # layers 0 and 2
    held = model.model.layers[0]._gradient_checkpointing_func
    assert held.keywords == options


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo looks at everything, as .grad
@pytest.mark.usefixtures("patched")
def test_a_compiled_model_offloads_with_the_key() -> None:
    """What the page says; else ``torch_compile=True`` would turn the offload off."""
    results = []
    for offload in (False, "disk"):
        model = tiny("qwen")
        del model.model.layers[1:]
        model.activation_checkpointing_enable(offload=offload)
        gradients(torch.compile(model, backend="eager"), 1)
        torch.compiler.reset()  # code compiled for one checkpoint function is not guarded by it
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*results)
    assert saved() == 1


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.usefixtures("patched")
def test_true_and_false_mean_what_they_did(value: bool) -> None:
    """Else the patch would change runs that do not ask for it."""
    model = tiny()
    model.activation_checkpointing_enable(offload=value)
    patched = model.model.layers[0]._gradient_checkpointing_func
    disco_transformers.disable()
    model.activation_checkpointing_enable(offload=value)
    original = model.model.layers[0]._gradient_checkpointing_func
    assert patched.func.__code__ is original.func.__code__
    assert patched.keywords == original.keywords


@pytest.mark.parametrize("value", ["Disk", "disc", "cpu", ""])
@pytest.mark.usefixtures("patched")
def test_an_unknown_value_is_an_error(value: str) -> None:
    """Else a typo would keep everything in host memory, as transformers takes it for True."""
    with pytest.raises(ValueError, match='"disk" keeps layer inputs with discod'):
        tiny().activation_checkpointing_enable(offload=value)


@pytest.mark.parametrize("key", ["offlaod", "off_load", "every_n_layer"])
@pytest.mark.usefixtures("patched")
def test_a_misspelt_key_is_an_error(key: str) -> None:
    """Else Llama's layers, which take any keyword, would swallow it."""
    with pytest.raises(ValueError, match=r"did you mean '(offload|every_n_layers)'"):
        tiny().activation_checkpointing_enable({key: "disk"})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # the name under test
@pytest.mark.usefixtures("patched")
def test_checkpointing_is_turned_off_and_on_with_the_options_as_they_were_given() -> None:
    """TRL does so around a reference model's forward, and would lose the offload or crash."""
    given = {"offload": "disk", "every_n_layers": 2}
    model = tiny()
    model.activation_checkpointing_enable(**given)
    model.gradient_checkpointing_disable()
    gradients(model, 1)
    assert saved() == 0
    model.gradient_checkpointing_enable(given)
    gradients(model, 1)
    assert saved() == 2
    assert given == {"offload": "disk", "every_n_layers": 2}


def test_enabling_twice_and_disabling_restore_the_very_originals() -> None:
    """Else patches would stack, or leave something of themselves behind."""
    before = dict(vars(PreTrainedModel))
    disco_transformers.enable()
    changed = dict(vars(PreTrainedModel))
    assert changed != before
    disco_transformers.enable()
    assert dict(vars(PreTrainedModel)) == changed
    disco_transformers.disable()
    disco_transformers.disable()
    assert dict(vars(PreTrainedModel)) == before


def test_releases_without_the_key_take_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4.5x has one method and no ``offload``; there the key would reach torch."""

    def enable_as_in_4_57(model: Any, gradient_checkpointing_kwargs: Any = None) -> None:
        options = gradient_checkpointing_kwargs or {"use_reentrant": True}
        checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, **options)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)

    monkeypatch.delattr(PreTrainedModel, "_activation_checkpointing_enable")
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", enable_as_in_4_57)
    disco_transformers.enable()
    try:
        model = tiny()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"offload": "disk"})
        gradients(model, MICRO_STEPS)
        assert saved() == LAYERS * MICRO_STEPS
        for options in ({"offload": "disc"}, {"offload": True}, {"every_n_layers": 2}):
            with pytest.raises(ValueError, match="is not known"):
                model.gradient_checkpointing_enable(options)
    finally:
        disco_transformers.disable()
    assert PreTrainedModel.gradient_checkpointing_enable is enable_as_in_4_57


@pytest.mark.usefixtures("patched")
def test_a_model_that_calls_torch_itself_is_refused() -> None:
    """Else its layer inputs would stay in memory without a word."""

    class Remote(type(tiny())):  # type: ignore[misc]  # as code from the hub, of an older format
        def _set_gradient_checkpointing(self, module: Any, value: bool = False) -> None:
            pass

    with pytest.raises(UsageError, match="DiscodCallback"):
        Remote(ARCHITECTURES["llama"].config).activation_checkpointing_enable(offload="disk")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.usefixtures("patched")
def test_generation_costs_nothing(use_cache: bool) -> None:
    """Else RL, which generates with a model in training mode, would save at every token."""
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    prompt = {name: batch()[name][:2] for name in ("input_ids", "attention_mask")}
    expected = tiny().eval().generate(**prompt, **options, use_cache=use_cache)
    model = tiny().eval()
    model.activation_checkpointing_enable(offload="disk")
    assert torch.equal(model.generate(**prompt, **options, use_cache=use_cache), expected)
    model.train()
    model.generate(**prompt, **options, use_cache=use_cache)
    assert saved() == 0


@pytest.mark.usefixtures("patched")
def test_evaluation_costs_nothing() -> None:
    """Else a validation pass would write activations that no backward reads."""
    model = tiny()
    model.activation_checkpointing_enable(offload="disk")
    with torch.no_grad():
        model(**batch())
    model.eval()(**batch()).loss.backward()
    assert saved() == 0


@pytest.mark.usefixtures("patched")
def test_a_trainer_reaches_the_same_weights(tmp_path: Path) -> None:
    """The whole way of a user: arguments, accumulation, optimizer, evaluation."""
    plain = train(tiny(), tmp_path)
    assert saved() == 0
    options = {"activation_checkpointing_kwargs": {"offload": "disk"}}
    trainer = train(tiny(), tmp_path, **options)
    assert_same(dict(trainer.model.state_dict()), dict(plain.model.state_dict()))
    assert saved() == LAYERS * MICRO_STEPS * STEPS
    assert (
        trainer.evaluate(rows(MICRO_STEPS))["eval_loss"]
        == plain.evaluate(rows(MICRO_STEPS))["eval_loss"]
    )
    assert saved() == LAYERS * MICRO_STEPS * STEPS
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_the_callback_needs_no_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reentrant: bool
) -> None:
    """Else checkpoints that no key reaches would stay in memory, or the patch stay on for good."""
    options = {"activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain = train(tiny(), tmp_path, **options)
    originals = dict(vars(torch.utils.checkpoint))
    model = tiny()
    trainer = train(model, tmp_path, [DiscodCallback()], **options)
    assert_same(dict(model.state_dict()), dict(plain.model.state_dict()))
    assert saved() == LAYERS * MICRO_STEPS * STEPS
    trainer.evaluate(rows(MICRO_STEPS))
    assert saved() == LAYERS * MICRO_STEPS * STEPS
    assert dict(vars(torch.utils.checkpoint)) == originals
    assert warnings_of_ours(caplog) == []


@pytest.mark.usefixtures("patched")
def test_all_ways_at_once(tmp_path: Path) -> None:
    """Else a key beside the callback, or beside ``patch_torch``, would store everything twice."""
    plain = train(tiny(), tmp_path)
    options = {"activation_checkpointing_kwargs": {"offload": "disk"}}
    with disco_client.offload():
        everything = train(tiny(), tmp_path, [DiscodCallback()], **options)
    assert_same(dict(everything.model.state_dict()), dict(plain.model.state_dict()))
    outside = disco_client.stats().saved_blobs - LAYERS * MICRO_STEPS * STEPS
    assert outside == 4 * MICRO_STEPS * STEPS  # around the last norm, and in the loss


def test_the_callback_leaves_a_patch_that_was_on_before(tmp_path: Path) -> None:
    """Else the end of one training would switch off what another part of the program relies on."""
    torch_patch.enable()
    try:
        train(tiny(), tmp_path, [DiscodCallback()])
        assert torch_patch.patch.enabled
    finally:
        torch_patch.disable()


def test_the_callback_survives_a_training_that_raised(tmp_path: Path) -> None:
    """Else a run that is tried again after an error would leave the patch on for ever."""
    broken = tiny()
    broken.model.layers[1].forward = None
    with pytest.raises(TypeError):
        train(broken, tmp_path, [DiscodCallback()])
    train(tiny(), tmp_path, [DiscodCallback()])
    assert not torch_patch.patch.enabled
    assert saved() > 0


def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("disco_client") and record.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize("way", ["key", "callback"])
@pytest.mark.parametrize("fault", ["off", "small"])
def test_one_warning_when_nothing_was_offloaded(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    attach_to: Attach,
    shared_daemon: Any,
    caplog: pytest.LogCaptureFixture,
    way: str,
    fault: str,
) -> None:
    """Else users would train without any offload, sure that they have it."""
    if way == "key":
        request.getfixturevalue("patched")
    callbacks = [DiscodCallback()] if way == "callback" else []
    options = {"activation_checkpointing_kwargs": {"offload": "disk"}} if way == "key" else {}
    if fault == "small":
        disco_client.close()
        attach_to(shared_daemon, arena="32MiB", min_bytes="1GiB")
    train(tiny(), tmp_path, callbacks, activation_checkpointing=fault != "off", **options)
    (warning,) = warnings_of_ours(caplog)
    expected = {"off": "Is activation_checkpointing=True", "small": "min_bytes is 1.0 GiB"}
    assert expected[fault] in warning
    assert saved() == 0


@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # the page is for GPUs
def test_the_page_works_as_it_is_copied(tmp_path: Path) -> None:
    """Else the first thing that a user of transformers tries fails."""
    model = tiny()
    try:
        run_page(
            "frameworks/transformers.md",
            model=model,
            dataset=rows(MICRO_STEPS),
            output_dir=str(tmp_path),
        )
    finally:
        disco_transformers.disable()
    assert saved() >= LAYERS
