"""One rank of a script of torch, and of runs that go on from it under plans: ``python -m exchange_ranks FOLDER``.

The script trains with ``fully_shard`` and saves by torch's distributed checkpoint. What rank 0 found goes to
``FOLDER/found.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.scenarios.module_plans.own_loop import parallelize

PLANS = (
    "data=2,zero=3",
    "data=2",
    "data=2,zero=1,num_microbatches=2",
    "pipeline=2,num_microbatches=2",
    "tensor=2",
    "tensor=2,num_microbatches=2,recompute=full",
)
STEPS = 3
"""Of the script before it saves, and of every run after it."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Model().double()


def make_optimizer(module: nn.Module) -> Optimizer:
    biases = [parameter for name, parameter in module.named_parameters() if name.endswith("bias")]
    weights = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
    return AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.05)


def make_scheduler(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, 2, gamma=0.5)


def list_batches(count: int, seed: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 6, generator=draws, dtype=torch.float64) for _ in range(count)]


def train_plainly(
    module: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, batches: list[Tensor], rank: int, num_ranks: int
) -> list[float]:
    """Return the losses of all ranks in a loop by hand, each with its part of every batch."""
    losses = []
    for batch in batches:
        loss = module(batch.chunk(num_ranks)[rank])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if num_ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total) / num_ranks)
    return losses


def load_plainly(folder: Path, name: str) -> list[float]:
    """Return the losses of a module in one process that goes on from states of ``get_state_dict``."""
    module = build(seed=9)
    optimizer = make_optimizer(module)
    scheduler = make_scheduler(optimizer)
    model_states, optimizer_states = get_state_dict(module, optimizer)
    states = {"model": model_states, "optimizer": optimizer_states, "scheduler": scheduler.state_dict()}
    dcp.load(states, checkpoint_id=folder / name, no_dist=True)
    set_state_dict(module, optimizer, model_state_dict=model_states, optim_state_dict=states["optimizer"])
    scheduler.load_state_dict(states["scheduler"])
    return train_plainly(module, optimizer, scheduler, list_batches(STEPS, 2), 0, 1)


def run(folder: Path, rank: int) -> dict[str, Any]:
    """Return the losses after the checkpoint of the script, under every plan, and after the export of every plan."""
    module = build(seed=0)
    mesh = init_device_mesh("cpu", (2,))
    for layer in module.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = make_optimizer(module)
    scheduler = make_scheduler(optimizer)
    train_plainly(module, optimizer, scheduler, list_batches(STEPS, 1), rank, 2)
    model_states, optimizer_states = get_state_dict(module, optimizer)
    states = {"app": {"model": model_states, "optim": optimizer_states}, "lr": scheduler.state_dict()}
    dcp.save(states, checkpoint_id=folder / "script")
    found: dict[str, Any] = {
        "script": train_plainly(module, optimizer, scheduler, list_batches(STEPS, 2), rank, 2), "plans": {}
    }  # fmt: skip
    for words in PLANS:
        options: dict[str, Any] = {"optimizer": make_optimizer, "scheduler": make_scheduler, "precision": "fp64"}
        step = parallelize(build(seed=5), words, **options)
        step.start_from(folder / "script")
        losses = [step.global_batch(batch) for batch in list_batches(STEPS, 2)]
        # from what it wrote a plain loop goes on as this run does
        step = parallelize(build(seed=6), words, **options)
        step.start_from(folder / "script")
        step.global_batch(list_batches(1, 3)[0])
        step.export(folder / words, format="dcp")
        rest = [step.global_batch(batch) for batch in list_batches(STEPS, 2)]
        again = parallelize(build(seed=7), words, **options)
        again.start_from(folder / words)
        found["plans"][words] = {
            "losses": losses,
            "rest": rest,
            "plain": load_plainly(folder, words),
            "again": [again.global_batch(batch) for batch in list_batches(STEPS, 2)],
        }
    return found


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    with join_process_group(folder, 60.0):
        found = run(folder, rank)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, rank)))
