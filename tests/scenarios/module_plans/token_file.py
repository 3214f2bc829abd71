"""A user's file with four equal blocks between an embedding and a head."""

BATCH, HIDDEN, ROWS = 16, 64, 32
FILE = f"""
import torch
from torch import nn
from torch.nn import functional

BATCH = {BATCH}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm({HIDDEN})
        self.up, self.down = nn.Linear({HIDDEN}, 256), nn.Linear(256, {HIDDEN})

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding({ROWS}, {HIDDEN})
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear({HIDDEN}, {ROWS})

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def model():
    return Tokens()


def data():
    return torch.utils.data.TensorDataset(torch.arange(128 * 64).view(128, 64) % {ROWS})
"""
