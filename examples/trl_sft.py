"""TRL's SFTTrainer with LoRA: each checkpointed layer's input goes to discod.

Model and tokenizer are made here, small and untrained, so that nothing is downloaded.

python examples/trl_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import disco_client
from disco_client.patches import transformers as disco_transformers

WORDS = 100
LENGTH = 512


def main() -> None:
    """Train two steps, and say what was moved."""
    disco_transformers.enable()  # before the trainer is made

    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n + 3 for n in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    texts = [" ".join(f"w{(row + n) % WORDS}" for n in range(LENGTH)) for row in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder,
            activation_checkpointing_kwargs={"offload": "disk"},  # checkpointing is TRL's default
            per_device_train_batch_size=2,
            max_length=LENGTH,
            max_steps=2,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model,
            config,
            train_dataset=Dataset.from_list([{"text": text} for text in texts]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        trainer.train()
    counters = disco_client.stats().last_cycle
    saved, written = counters.saved_bytes >> 20, counters.written_bytes >> 20
    print(f"the last step: {counters.saved_blobs} tensors, {saved} MiB, {written} MiB written")


if __name__ == "__main__":
    main()
