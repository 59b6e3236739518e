"""Tiny random models of the transformers package, and a tokenizer, made without any download.

A hidden state is 32 KiB (``BATCH`` x ``LENGTH`` x ``WIDTH`` floats), far above ``MIN_BYTES``.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_layers import GradientCheckpointingLayer

LAYERS = 3
WIDTH = 64
HEADS = 4
BATCH = 4
LENGTH = 32
VOCABULARY = 96
MIN_BYTES = "4KiB"

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Architecture(NamedTuple):
    """One kind of model.

    Attributes:
        model: Its class.
        config: Its configuration, tiny.
        shared: Blobs of a step that are not one layer's input: what several layers are given.
        layers: Layers that are checkpointed.
        reentrant_only: Blobs more in the reentrant form, which hands no leaf from layer to layer.
    """

    model: Any
    config: Any
    shared: int = 0
    layers: int = LAYERS
    reentrant_only: int = 0


ARCHITECTURES = {
    "llama": Architecture(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**_LLAMA_LIKE, attention_dropout=0.1),
    ),
    "qwen": Architecture(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**_LLAMA_LIKE)),
    "gpt2": Architecture(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=256,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        shared=1,
    ),
    "bert": Architecture(
        transformers.BertForMaskedLM,
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=256,
            pad_token_id=0,
        ),
        shared=1,
    ),
    "t5": Architecture(
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=WIDTH // HEADS,
            d_ff=2 * WIDTH,
            num_layers=LAYERS,
            num_decoder_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.1,
            pad_token_id=0,
            decoder_start_token_id=0,
            eos_token_id=2,
        ),
        layers=2 * LAYERS,
        shared=5,
        reentrant_only=1,  # a position bias that is a leaf otherwise
    ),
}


def tiny(kind: str = "llama", seed: int = 0) -> Any:
    """A model in training mode; equal for equal arguments."""
    torch.manual_seed(seed)
    architecture = ARCHITECTURES[kind]
    return architecture.model(architecture.config).train()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """What every kind of model takes, with padding in the last row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[-1, LENGTH // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def rows(batches: int) -> list[dict[str, torch.Tensor]]:
    """A data set of so many batches."""
    return [
        {name: values[row] for name, values in batch(seed).items()}
        for seed in range(batches)
        for row in range(BATCH)
    ]


def gradients(model: nn.Module, micro_steps: int) -> dict[str, torch.Tensor | None]:
    """Those of some accumulated micro-steps."""
    torch.manual_seed(7)
    for seed in range(micro_steps):
        model(**batch(seed)).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def layer_inputs(model: nn.Module) -> list[StorageWeakRef]:
    """Weak references to what the layers of ``model`` are given from now on, in their order."""
    found: list[StorageWeakRef] = []

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.append(StorageWeakRef(inputs[0].untyped_storage()))

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(note)
    return found


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Every tensor is equal, bit for bit, and some are not zero."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor is None and other[name] is None) or torch.equal(tensor, other[name]), name
    assert any(tensor is not None and tensor.any() for tensor in one.values())


def trainer_options(path: Path, steps: int, micro_steps: int) -> dict[str, Any]:
    """What every trainer's configuration needs for a short, silent run on the CPU."""
    return {
        "output_dir": str(path),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": micro_steps,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def tokenizer() -> Any:
    """Of words ``w3`` to ``w95``, with padding and an end."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    words = {f"w{i}": i for i in range(len(special), VOCABULARY)}
    inner = Tokenizer(models.WordLevel({**special, **words}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
