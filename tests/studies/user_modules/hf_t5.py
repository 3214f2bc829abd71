"""A tiny T5 that sorts: the source is padded, the target has a fixed length."""

import random

import torch
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration

BATCH = 16
PAD, EOS, OFFSET = 0, 1, 2
LETTERS, MAX_SOURCE, TARGET = 20, 20, 8


class SmallestLetters(Dataset):
    """Which are the eight smallest of 8 to 19 letters, in order?"""

    def __len__(self):
        return 6000

    def __getitem__(self, i):
        r = random.Random(i)
        letters = [r.randrange(LETTERS) + OFFSET for _ in range(r.randint(TARGET, MAX_SOURCE - 1))]
        source = [*letters, EOS]
        padding = MAX_SOURCE - len(source)
        return {
            "input_ids": torch.tensor(source + [PAD] * padding),
            "attention_mask": torch.tensor([1] * len(source) + [0] * padding),
            "labels": torch.tensor([*sorted(letters)[:TARGET], EOS]),
        }


def model():
    config = T5Config(
        vocab_size=LETTERS + OFFSET,
        d_model=80,
        d_kv=20,
        d_ff=160,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=EOS,
        use_cache=False,
    )
    return T5ForConditionalGeneration._from_config(config)


def data():
    return SmallestLetters()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 20, (20 / (s + 1)) ** 0.5))
