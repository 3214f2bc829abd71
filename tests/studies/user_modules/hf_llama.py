"""A tiny Llama, from its config, on the bytes of a standard-library file."""

import json.decoder
import pathlib

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

BATCH = 16
BLOCK_SIZE = 48


class Lines(Dataset):
    def __init__(self):
        folder = pathlib.Path(json.decoder.__file__).parent
        text = b"\n".join(p.read_bytes() for p in sorted(folder.glob("*.py")))
        ids = torch.tensor(list(text))
        self.blocks = ids[: len(ids) // BLOCK_SIZE * BLOCK_SIZE].view(-1, BLOCK_SIZE)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return {"input_ids": self.blocks[i], "labels": self.blocks[i]}


def model():
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def data():
    return Lines()


def optimizer(model):
    skip = ("norm", "embed_tokens")
    decay = [p for n, p in model.named_parameters() if not any(s in n for s in skip)]
    plain = [p for n, p in model.named_parameters() if any(s in n for s in skip)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


def scheduler(optimizer):
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[10])
