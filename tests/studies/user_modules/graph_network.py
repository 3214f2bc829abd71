"""Message passing on small random graphs, each as a dense adjacency matrix: predict a property of the graph."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH = 16
NODES, FEATURES = 32, 8


class RandomGraphs(torch.utils.data.Dataset):
    def __init__(self, size=3000):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        p = 0.05 + 0.3 * torch.rand(1, generator=g)
        upper = (torch.rand(NODES, NODES, generator=g) < p).float().triu(1)
        adj = upper + upper.T
        kind = torch.randint(0, FEATURES, (NODES,), generator=g)
        nodes = F.one_hot(kind, FEATURES).float()
        # energy: a bond has less where its ends are of the same parity
        same = (kind[:, None] % 2 == kind[None, :] % 2).float()
        energy = (adj * (1 - 1.5 * same)).sum() / NODES
        degree = adj.sum(1).mean() / 4
        return nodes, adj, torch.stack([energy, degree])


class MessagePassing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.update = nn.GRUCell(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, h, adj):
        m = torch.bmm(adj, self.message(h)) / 4.0
        B, N, D = h.shape
        h = self.update(m.reshape(B * N, D), h.reshape(B * N, D)).view(B, N, D)
        return self.norm(h)


class GraphNet(nn.Module):
    def __init__(self, dim=112, rounds=5):
        super().__init__()
        self.encode = nn.Linear(FEATURES, dim)
        self.rounds = nn.ModuleList([MessagePassing(dim) for _ in range(rounds)])
        self.attend = nn.Linear(dim, 1)
        self.readout = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Dropout(0.05), nn.Linear(dim, 2))

    def forward(self, nodes, adj, target):
        h = self.encode(nodes)
        for layer in self.rounds:
            h = layer(h, adj)
        weights = self.attend(h).softmax(dim=1)
        pooled = torch.cat([h.mean(1), (weights * h).sum(1)], dim=-1)
        return F.smooth_l1_loss(self.readout(pooled), target)


def model():
    return GraphNet()


def data():
    return RandomGraphs()
