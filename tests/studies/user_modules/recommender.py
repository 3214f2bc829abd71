"""DLRM-style click model: embedding tables, pairwise interactions, a bottom and a top MLP."""

import itertools
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH = 64
TABLES = {"user": 6000, "item": 3000, "category": 24, "city": 50, "device": 4}
DENSE = 6
DIM = 32


def mlp(sizes, last_relu=True):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({name: nn.Embedding(rows, DIM) for name, rows in TABLES.items()})
        for table in self.embeddings.values():
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.bottom = mlp([DENSE, 256, 128, DIM])
        pairs = (len(TABLES) + 1) * len(TABLES) // 2
        self.top = mlp([DIM + pairs, 512, 384, 128, 1], last_relu=False)
        i, j = torch.tril_indices(len(TABLES) + 1, len(TABLES) + 1, offset=-1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)

    def forward(self, dense, history, click=None, **ids):
        d = self.bottom(dense)
        vectors = [d]
        for name, table in self.embeddings.items():
            v = table(ids[name])
            if name == "item":  # the candidate together with what was seen before
                v = v + table(history).mean(1)
            vectors.append(v)
        z = torch.stack(vectors, dim=1)
        inter = z @ z.transpose(1, 2)
        return self.top(torch.cat([d, inter[:, self.i, self.j]], dim=1)).squeeze(-1)


class Clicks(torch.utils.data.Dataset):
    def __init__(self, rows=20000):
        self.rows = rows
        r = random.Random(0)
        self.taste = [[r.gauss(0, 1) for _ in range(TABLES["category"])] for _ in range(TABLES["device"])]
        self.city = [r.gauss(0, 1) for _ in range(TABLES["city"])]

    def __len__(self):
        return self.rows

    def __getitem__(self, n):
        r = random.Random(n)
        user, item = int(r.random() ** 2 * TABLES["user"]), int(r.random() ** 2 * TABLES["item"])
        category, city, device = item % TABLES["category"], r.randrange(TABLES["city"]), user % TABLES["device"]
        dense = [r.gauss(0, 1) for _ in range(DENSE)]
        score = 2 * dense[0] - 1.5 * dense[1] + dense[2] * dense[3] + self.taste[device][category] + self.city[city]
        return {
            "dense": torch.tensor(dense),
            "history": torch.tensor([int(r.random() ** 2 * TABLES["item"]) for _ in range(5)]),
            "user": torch.tensor(user),
            "item": torch.tensor(item),
            "category": torch.tensor(category),
            "city": torch.tensor(city),
            "device": torch.tensor(device),
            "click": torch.tensor(float(score > 0)),
        }


def model():
    return DLRM()


def data():
    return Clicks()


def loss(outputs, batch):
    return F.binary_cross_entropy_with_logits(outputs, batch["click"])


def optimizer(model):
    tables = list(model.embeddings.parameters())
    dense = list(model.bottom.parameters()) + list(model.top.parameters())
    return torch.optim.Adagrad([{"params": tables, "lr": 0.05}, {"params": dense, "lr": 0.01}])
