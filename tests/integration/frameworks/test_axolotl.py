"""Axolotl: ``activation_offloading: disk``, against its published code."""

import copy
import gc
import importlib
import io
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
import trl  # noqa: F401  # Axolotl's modules import it
import yaml
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

import disco_client
from tests.helpers.axolotl_source import importable
from tests.helpers.daemon import Daemon
from tests.helpers.pages import DOCS

LAYERS = 3
STEPS = 2
MICRO_STEPS = 2
LENGTH = 256
WIDTH = 64
"""A hidden state is 64 KiB."""

# PEFT's use of what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

PLUGIN = "disco_client.patches.axolotl.DiscodPlugin"


@dataclass
class Arguments(transformers.TrainingArguments):
    """Axolotl's, as far as this needs them."""

    activation_offloading: Any = None


@pytest.fixture(scope="module", autouse=True)
def axolotl() -> Iterator[SimpleNamespace]:
    """Axolotl's modules that take part, and our patch of them."""
    with importable():
        yield SimpleNamespace(
            plugins=importlib.import_module("axolotl.integrations.base"),
            checkpointing=importlib.import_module("axolotl.monkeypatch.gradient_checkpointing"),
            mixin=importlib.import_module("axolotl.core.trainers.mixins.activation_checkpointing"),
            patch=importlib.import_module("disco_client.patches.axolotl"),
        )


@pytest.fixture(autouse=True)
def unpatched(axolotl: SimpleNamespace) -> Iterator[None]:
    yield
    axolotl.patch.disable()
    axolotl.plugins.PluginManager.get_instance().plugins.clear()
    gc.collect()


@pytest.fixture
def attached(shared_daemon: Daemon, attach_to: Callable[..., None]) -> None:
    attach_to(shared_daemon, arena="16MiB", min_bytes="64KiB")


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def full(axolotl: SimpleNamespace) -> nn.Module:
    """As Axolotl's loader makes a model for full fine-tuning with any offloading."""
    model = llama()
    axolotl.mixin.ac_wrap_hf_model(model)
    return model


def lora(axolotl: SimpleNamespace) -> nn.Module:
    """As Axolotl's loader makes a model with an adapter."""
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(llama(), config)


FORMS = {"full": full, "lora": lora}


def trainer(axolotl: SimpleNamespace, folder: Path, model: nn.Module, offloading: Any) -> Any:
    class Trainer(axolotl.mixin.ActivationOffloadingMixin):  # type: ignore[misc]
        pass

    arguments = Arguments(
        output_dir=str(folder),
        activation_offloading=offloading,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICRO_STEPS,
        max_steps=STEPS,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 128, (LENGTH,), generator=generator) for _ in range(8)]
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model=model, args=arguments, train_dataset=data)


def trained(
    axolotl: SimpleNamespace, folder: Path, model: nn.Module, offloading: Any
) -> list[torch.Tensor]:
    """The weights after two steps of two micro-steps."""
    trainer(axolotl, folder, model, offloading).train()
    return list(model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_disk_goes_to_discod(
    attached: None, axolotl: SimpleNamespace, tmp_path: Path, form: str
) -> None:
    """Else ``disk`` would fill the RAM, train other weights, or store the wrong things."""
    plain = trained(axolotl, tmp_path, FORMS[form](axolotl), None)
    axolotl.patch.enable()
    assert all(map(torch.equal, trained(axolotl, tmp_path, FORMS[form](axolotl), "disk"), plain))
    blobs = disco_client.stats().saved_blobs
    boundaries = LAYERS * STEPS * MICRO_STEPS
    assert blobs == boundaries if form == "full" else blobs > 5 * boundaries
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offloading", [True, "legacy", "hidden_states"])
def test_other_values_keep_their_meaning(
    attached: None,
    axolotl: SimpleNamespace,
    tmp_path: Path,
    form: str,
    offloading: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a configuration that asks for CPU offloading would write to the disk."""
    made = []

    def offloader(model: Any = None, *, use_streams: bool) -> Any:
        made.append(use_streams)
        return torch.autograd.graph.save_on_cpu()

    hidden = "axolotl.monkeypatch.checkpoint_activation_offload"
    for module, name in (
        (axolotl.mixin, "get_act_offloading_ctx_manager"),
        (axolotl.mixin, "get_lora_act_offloading_ctx_manager"),
        (importlib.import_module(hidden), "get_checkpoint_hidden_states_offloading_ctx_manager"),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, offloader)
    axolotl.patch.enable()
    trained(axolotl, tmp_path, FORMS[form](axolotl), offloading)
    assert made == [offloading != "legacy"]
    assert disco_client.stats().saved_blobs == 0


def page() -> str:
    return (DOCS / "frameworks" / "axolotl.md").read_text()


def configurations() -> dict[str, str]:
    """The YAML that a reader may start from."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
    return {"page": block, "example": (DOCS.parent / "examples" / "axolotl.yaml").read_text()}


@pytest.mark.parametrize("block", configurations().values(), ids=configurations())
def test_the_page_as_a_configuration(
    attached: None,
    axolotl: SimpleNamespace,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    block: str,
) -> None:
    """Else the lines that the page has one copy would not load the plugin, or not enable it."""
    dictionary = importlib.import_module("axolotl.utils.dict").DictDefault
    cfg = dictionary(yaml.safe_load(block))
    assert cfg["plugins"] == [PLUGIN]
    manager = axolotl.plugins.PluginManager.get_instance()
    for name in cfg["plugins"]:
        manager.register(name)
    assert isinstance(manager.plugins[PLUGIN], axolotl.plugins.BasePlugin)
    original = vars(axolotl.mixin.ActivationOffloadingMixin)["__init__"]
    manager.pre_model_load(cfg)
    model = full(axolotl)
    trained(axolotl, tmp_path, model, cfg["activation_offloading"])
    assert disco_client.stats().saved_blobs == LAYERS * STEPS * MICRO_STEPS
    manager.post_train(cfg, model)
    assert vars(axolotl.mixin.ActivationOffloadingMixin)["__init__"] is original
    assert [r for r in caplog.records if r.name.startswith("disco_client")] == []
    manager.pre_model_load(dictionary(activation_offloading=True))
    (record,) = [r for r in caplog.records if r.name.startswith("disco_client")]
    assert "activation_offloading is True" in record.getMessage()


def test_nothing_to_offload_is_said_once(
    attached: None, axolotl: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else one would believe that ``disk`` reaches a trainer that it does not reach."""
    axolotl.patch.enable()
    with caplog.at_level(logging.WARNING, "disco_client"):
        trained(axolotl, tmp_path, full(axolotl), None)
    (record,) = [r for r in caplog.records if r.name.startswith("disco_client")]
    assert "no checkpointed call reached discod" in record.getMessage()
    assert "activation_offloading: disk" in record.getMessage()


@pytest.mark.parametrize("form", FORMS)
def test_the_model_stays_as_it_is(
    attached: None, axolotl: SimpleNamespace, tmp_path: Path, form: str
) -> None:
    """Else a saved model would have other keys, or copying it would fail."""
    model = FORMS[form](axolotl)
    names = list(model.state_dict())
    axolotl.patch.enable()
    ours = trainer(axolotl, tmp_path, model, "disk")
    ours.train()
    assert ours.args.activation_offloading == "disk"
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, copied.parameters(), model.parameters()))
    torch.save(model.state_dict(), io.BytesIO())
    model.save_pretrained(tmp_path / "saved")


def gradients(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """Of a tiny Llama whose gradient checkpointing is ``checkpoint``, set as Axolotl sets it."""
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", checkpoint)
    model = llama()
    model.train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    torch.manual_seed(1)
    tokens = torch.randint(0, 128, (1, LENGTH))
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_our_disco_in_axolotls_wrapper(
    attached: None, axolotl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else our Disco would not take the calls that Axolotl's takes, or give other gradients."""
    plain = gradients(transformers.modeling_utils.checkpoint, monkeypatch)
    axolotl.patch.enable()
    assert axolotl.checkpointing.Disco is disco_client.Disco
    wrapper = axolotl.checkpointing.hf_grad_checkpoint_disk_offload_wrapper
    for one, other in zip(gradients(wrapper, monkeypatch), plain, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert disco_client.stats().saved_blobs == LAYERS


def test_our_manager_has_axolotls_calls(axolotl: SimpleNamespace, attached: None) -> None:
    """Else code written for Axolotl's DiskOffloadManager would not run with ours."""
    theirs = importlib.import_module(
        "axolotl.monkeypatch.gradient_checkpointing.offload_disk"
    ).DiskOffloadManager
    for name in ("save_tensor", "load_tensor", "wait_for_save", "cleanup_tensor", "cleanup"):
        assert callable(getattr(theirs, name))
        assert callable(getattr(disco_client.DiskOffloadManager, name))
    manager = disco_client.DiskOffloadManager(
        prefetch_size=3, prefetch_to_gpu=False, save_workers=4
    )
    tensor = torch.randn(WIDTH, LENGTH)
    assert torch.equal(manager.load_tensor(manager.save_tensor(tensor), "cpu"), tensor)
    manager.cleanup()


def test_enabled_twice_and_disabled(axolotl: SimpleNamespace) -> None:
    """Else a second enable would stack, or Axolotl and torch would stay changed after disable."""
    places = [
        (axolotl.checkpointing, "Disco"),
        (axolotl.checkpointing, "hf_grad_checkpoint_disk_offload_wrapper"),
        (axolotl.mixin.ActivationOffloadingMixin, "__init__"),
        (CheckpointWrapper, "forward"),
    ]
    originals = [vars(owner)[name] for owner, name in places]
    axolotl.patch.enable()
    replaced = [vars(owner)[name] for owner, name in places]
    axolotl.patch.enable()
    for (owner, name), new, old in zip(places, replaced, originals, strict=True):
        assert vars(owner)[name] is new
        assert new is not old
    axolotl.patch.disable()
    axolotl.patch.disable()
    assert [vars(owner)[name] for owner, name in places] == originals
