"""Tiny language models of transformers, and one of our own, on samples with different numbers of labels that count."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 8
WORDS, LENGTH = 40, 10


class Counted(nn.Module):
    """Its forward names the number of labels of the step, as the losses of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = self.head(self.words(input_ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=LENGTH))


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "counted": Counted,
    "llama": make_llama,
    "gpt2": make_gpt2,
    "t5": make_t5,
}


class Samples(torch.utils.data.Dataset[Any]):
    """Samples that are drawn from their number."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(self.seed + number)
        tokens = torch.randint(WORDS, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[int(torch.randint(2, LENGTH, (1,), generator=generator)) :] = -100
        return {"input_ids": tokens, "labels": labels}


def model() -> nn.Module:
    return KINDS[os.environ["KIND"]]()


def data() -> Samples:
    return Samples(44, 0)


def evaluation_data() -> Samples:
    return Samples(13, 1000)
