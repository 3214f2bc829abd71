"""Byte-level LSTM language model on the source of a few modules of the standard library."""

import argparse
import inspect
import textwrap

import torch
from torch import nn
from torch.utils.data import Dataset

BATCH = 16
SEQ_LEN = 64


class ByteText(Dataset):
    def __init__(self):
        source = "".join(inspect.getsource(m) for m in (argparse, textwrap, inspect))
        self.data = torch.tensor(list(source.encode("utf-8", "replace")), dtype=torch.uint8)

    def __len__(self):
        return (len(self.data) - 1) // SEQ_LEN

    def __getitem__(self, i):
        chunk = self.data[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].long()
        return chunk[:-1], chunk[1:]


class CharLSTM(nn.Module):
    def __init__(self, embed=64, hidden=176, layers=2):
        super().__init__()
        self.embed = nn.Embedding(256, embed)
        self.lstm = nn.LSTM(embed, hidden, num_layers=layers, batch_first=True, dropout=0.2)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(hidden, 256)
        self.criterion = nn.CrossEntropyLoss()
        self.reset_parameters()

    def reset_parameters(self):
        for name, p in self.lstm.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(p)
            elif "bias_ih" in name:
                with torch.no_grad():  # open the forget gates
                    p[p.numel() // 4 : p.numel() // 2].fill_(1.0)

    def forward(self, x, y):
        out, _ = self.lstm(self.embed(x))
        logits = self.fc(self.dropout(out))
        return self.criterion(logits.view(-1, 256), y.reshape(-1))


def model():
    return CharLSTM()


def data():
    return ByteText()


def optimizer(model):
    return torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200, eta_min=1e-4)
