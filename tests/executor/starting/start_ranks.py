"""One rank that starts modules under plans in one process group: ``python -m start_ranks FOLDER``.

What each rank found goes to ``FOLDER/found-RANK.json``, and first weights, which are not trained, to ``FOLDER``.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.modules.sharding import find_rank
from meshwise.executor.operators.local_stage import Placement
from meshwise.scenarios.module_plans.own_loop import parallelize

WORDS, WIDTH, SEED = 11, 8, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        nn.init.orthogonal_(self.down.weight)
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.1 + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """A model with tied tables, a table of positions and copied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.temperature = nn.Parameter(torch.rand(()) + 1)
        self.register_buffer("positions", torch.randn(6, WIDTH) * 0.02)
        with torch.no_grad():
            self.layers[1].up.weight.copy_(self.layers[0].down.weight.t())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.temperature * self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def build_on_own_generator() -> nn.Module:
    """Return a module that rank 1 cannot record."""
    module = Language()
    if find_rank() == 1:
        nn.init.normal_(module.head.bias, generator=torch.Generator().manual_seed(1))
    return module


def build_by_rank() -> nn.Module:
    """Return a module that is another one on each rank."""
    module = Language()
    nn.init.constant_(module.head.bias, float(find_rank()))
    return module


class Routed(Language):
    """A model whose course depends on values."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (2 if self.words.weight.sum() > 0 else 1)


def build_whole() -> nn.Module:
    """Return a module that was there before, with equal parameters on all ranks."""
    torch.manual_seed(0)
    return Language()


STARTS: dict[str, Callable[[], nn.Module]] = {
    "recorded": Language,
    "one rank refused": build_on_own_generator,
    "other values": build_by_rank,
    "routed": Routed,
}
PLANS = {
    "data=4,zero=3": ("recorded", "one rank refused", "other values", "routed", "whole"),
    "data=2,zero=2,pipeline=2,num_microbatches=2": ("recorded",),
    "pipeline=4,num_microbatches=2": ("recorded",),
    "data=4,zero=1,zero_shards=2": ("recorded",),
    "data=2,tensor=2": ("recorded", "whole"),
    "data=2,tensor=2,zero=2": ("recorded",),
    "pipeline=2,tensor=2,num_microbatches=2": ("recorded",),
    "data=4": ("recorded",),
}


def refuse(placement: Placement, ranks: Any, part: Tensor) -> Tensor:
    raise AssertionError(f"a whole of {placement.shape}")


def run(words: str, kind: str, folder: Path) -> dict[str, Any]:
    """Return what a rank has after a step without an update."""
    module: Any = build_whole() if kind == "whole" else STARTS[kind]
    step = parallelize(module, words, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.0), seed=SEED)
    is_deferred = any(parameter.is_meta for parameter in step.module.parameters())
    batch = torch.randint(1, WORDS, (8, 6), generator=torch.Generator().manual_seed(0))
    losses = [step.global_batch(batch) for _ in range(2)]
    if "tensor" in words:
        with patch.object(Placement, "gather", refuse):  # a checkpoint needs no whole parameter
            step.save(folder / words / "saved")
            assert step.load(folder / words / "saved") == 2
        losses.append(step.global_batch(batch))
    step.export(folder / words / kind)
    dist.barrier()
    return {"is_deferred": is_deferred, "losses": losses}


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    with join_process_group(folder, 60.0):
        found = {words: {kind: run(words, kind, folder) for kind in kinds} for words, kinds in PLANS.items()}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, rank)))
