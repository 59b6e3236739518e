"""transformers' Trainer: each checkpointed layer's input goes to discod.

The model is a small Llama with random weights, so that nothing is downloaded.

python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import disco_client
from disco_client.patches import transformers as disco_transformers

LENGTH = 512


def main() -> None:
    """Train two steps, and say what was moved."""
    disco_transformers.enable()  # before the model is set up

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    tokens = torch.randint(0, 128, (4, LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"offload": "disk"},
            per_device_train_batch_size=2,
            max_steps=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
    counters = disco_client.stats().last_cycle
    saved, written = counters.saved_bytes >> 20, counters.written_bytes >> 20
    print(f"the last step: {counters.saved_blobs} tensors, {saved} MiB, {written} MiB written")


if __name__ == "__main__":
    main()
