"""Denoiser of a small diffusion model: residual conv blocks modulated by the time step."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

BATCH = 16
SIZE = 16
STEPS = 1000
BETAS = torch.linspace(1e-4, 0.02, STEPS)
ALPHA_BAR = torch.cumprod(1 - BETAS, dim=0)


class Blobs(Dataset):
    """A clean picture of a few soft blobs, its time step and its noise, all fixed by the index."""

    def __len__(self):
        return 5000

    def __getitem__(self, idx):
        gen = torch.Generator().manual_seed(idx)
        centre = torch.rand(3, 2, 1, 1, generator=gen) * SIZE
        grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
        blobs = torch.exp(-((grid - centre) ** 2).sum(1) / 8.0)
        t = torch.randint(0, STEPS, (), generator=gen)
        return {"x0": blobs * 2 - 1, "noise": torch.randn(3, SIZE, SIZE, generator=gen), "t": t}


class TimeEmbedding(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2)))
        self.mlp = nn.Sequential(nn.Linear(dim, out), nn.SiLU(), nn.Linear(out, out))

    def forward(self, t):
        angles = t[:, None] * self.freqs
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class ResBlock(nn.Module):
    def __init__(self, channels, time_dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(time_dim, channels * 2)
        self.norm2 = nn.GroupNorm(8, channels)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        return x + self.conv2(self.dropout(F.silu(h)))


class Denoiser(nn.Module):
    def __init__(self, channels=48, depth=4, time_dim=128):
        super().__init__()
        self.register_buffer("alpha_bar", ALPHA_BAR.clone())
        self.time = TimeEmbedding(64, time_dim)
        self.inp = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(channels, time_dim) for _ in range(depth)])
        self.out = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, x0, noise, t):
        a = self.alpha_bar[t].view(-1, 1, 1, 1)
        x = self.inp(a.sqrt() * x0 + (1 - a).sqrt() * noise)
        emb = self.time(t)
        for block in self.blocks:
            x = block(x, emb)
        return F.mse_loss(self.out(x), noise)


def model():
    return Denoiser()


def data():
    return Blobs()


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
