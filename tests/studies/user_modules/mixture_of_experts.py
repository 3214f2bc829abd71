"""Decoder-only language model whose feed-forwards are mixtures of experts, on sequences of four 'dialects'."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH = 16
VOCAB, SEQ = 68, 32


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=8, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(num_experts)])

    def forward(self, x):
        B, T, D = x.shape
        probs = self.gate(x).softmax(dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        # sequence-wise balance: share of tokens of an expert times its mean probability
        load = F.one_hot(chosen, self.num_experts).sum(2).to(probs.dtype).mean(1) / self.top_k
        balance = self.num_experts * (load * probs.mean(1)).sum(-1).mean()

        flat, weights, chosen = x.reshape(-1, D), weights.reshape(-1, self.top_k), chosen.reshape(-1, self.top_k)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(B, T, D), balance


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.moe = MoE(dim, dim * 2)

    def forward(self, x, mask):
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        out, balance = self.moe(self.ffn_norm(x))
        return x + out, balance


class MoETransformer(nn.Module):
    def __init__(self, dim=64, heads=4, depth=3, aux_weight=0.01):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(SEQ, dim))
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        self.aux_weight = aux_weight
        self.register_buffer("mask", torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens, targets):
        x, aux = self.tok(tokens) + self.pos, 0.0
        for layer in self.layers:
            x, balance = layer(x, self.mask)
            aux = aux + balance
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.transpose(1, 2), targets) + self.aux_weight * aux


class Dialects(torch.utils.data.Dataset):
    """The first token names the dialect, which has its own rule for the next token."""

    def __len__(self):
        return 64 * 4 * 16

    def __getitem__(self, i):
        dialect, x = i % 4, (i // 4) % 64
        seq = [64 + dialect, x]
        while len(seq) <= SEQ:
            x = (x * (1, 5, 9, 13)[dialect] + 3 + 2 * dialect) % 64
            seq.append(x)
        seq = torch.tensor(seq)
        return {"tokens": seq[:-1], "targets": seq[1:]}


def model():
    return MoETransformer()


def data():
    return Dialects()


def optimizer(model):
    gates = [p for n, p in model.named_parameters() if ".gate." in n]
    rest = [p for n, p in model.named_parameters() if ".gate." not in n]
    return torch.optim.AdamW([{"params": rest}, {"params": gates, "lr": 1e-3, "weight_decay": 0.0}], lr=3e-3)
