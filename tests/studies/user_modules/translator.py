"""Translate numbers written in digits to English words: encoder-decoder with padding."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

BATCH = 16
PAD, BOS, EOS = 0, 1, 2
UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = {w: i + 3 for i, w in enumerate(UNITS + TENS + ["hundred", "thousand"])}
SRC_LEN, TGT_LEN = 7, 12


def spell(n):
    if n < 20:
        return [UNITS[n]]
    if n < 100:
        return [TENS[n // 10 - 2]] + ([UNITS[n % 10]] if n % 10 else [])
    if n < 1000:
        return [UNITS[n // 100], "hundred"] + (spell(n % 100) if n % 100 else [])
    return spell(n // 1000) + ["thousand"] + (spell(n % 1000) if n % 1000 else [])


class Numbers(Dataset):
    def __len__(self):
        return 8000

    def __getitem__(self, i):
        n = (i * 7919 + 13) % 10 ** (1 + i % 6)
        src = [int(c) + 3 for c in str(n)] + [EOS]
        tgt = [BOS] + [WORDS[w] for w in spell(n)] + [EOS]
        src += [PAD] * (SRC_LEN - len(src))
        tgt += [PAD] * (TGT_LEN + 1 - len(tgt))
        return torch.tensor(src), torch.tensor(tgt)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=32):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div)
        pe[:, 1::2] = torch.cos(position * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(1)]


class Translator(nn.Module):
    def __init__(self, d_model=128):
        super().__init__()
        self.d_model = d_model
        self.src_embed = nn.Embedding(16, d_model, padding_idx=PAD)
        self.tgt_embed = nn.Embedding(len(WORDS) + 3, d_model, padding_idx=PAD)
        self.pos = PositionalEncoding(d_model)
        self.transformer = nn.Transformer(
            d_model,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=256,
            dropout=0.1,
            batch_first=True,
        )
        self.generator = nn.Linear(d_model, len(WORDS) + 3, bias=False)
        nn.init.normal_(self.src_embed.weight, std=d_model**-0.5)
        nn.init.normal_(self.tgt_embed.weight, std=d_model**-0.5)
        self.generator.weight = self.tgt_embed.weight  # tied

    def forward(self, src, tgt):
        tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        src_pad, tgt_pad = src == PAD, tgt_in == PAD
        L = tgt_in.size(1)
        causal = torch.triu(torch.ones(L, L, dtype=torch.bool, device=tgt.device), diagonal=1)
        h = self.transformer(
            self.pos(self.src_embed(src) * math.sqrt(self.d_model)),
            self.pos(self.tgt_embed(tgt_in) * math.sqrt(self.d_model)),
            tgt_mask=causal,
            src_key_padding_mask=src_pad,
            tgt_key_padding_mask=tgt_pad,
            memory_key_padding_mask=src_pad,
        )
        logits = self.generator(h)
        total = F.cross_entropy(
            logits.reshape(-1, logits.size(-1)), tgt_out.reshape(-1), ignore_index=PAD, reduction="sum"
        )
        return total, (tgt_out != PAD).sum()


def model():
    return Translator()


def data():
    return Numbers()


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
