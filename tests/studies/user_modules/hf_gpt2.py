"""GPT-2 from scratch: learn to add two numbers, written out as characters."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH = 16
CHARS = "0123456789+=;"
STOI = {c: i for i, c in enumerate(CHARS)}
SUMS = 4  # equations in a sequence


class Additions(torch.utils.data.Dataset):
    def __init__(self, n=5000):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        text = ""
        for a, b in torch.randint(0, 50, (SUMS, 2), generator=g).tolist():
            text += f"{a:02d}+{b:02d}={a + b:02d};"
        input_ids = torch.tensor([STOI[c] for c in text])
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "labels": input_ids.clone(),
        }


def model():
    config = GPT2Config(
        vocab_size=len(CHARS),
        n_positions=64,
        n_embd=96,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def data():
    return Additions()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
