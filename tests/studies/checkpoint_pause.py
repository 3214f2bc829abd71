"""How long a step waits for a checkpoint that is written at once, and for one that is written beside the steps.

Run ``python -m tests.studies.checkpoint_pause OUT.json [MEGABYTES] [ROUNDS] [RANKS]``; by default a module has 100 MB
of parameters and moments of AdamW, in 8 rounds of the two kinds by turns A B B A, and one rank. A pause is the time
until ``step.save`` returns. Before each one what is under way is written, and a step is made; the first two of each
kind are left out. Steps beside which a checkpoint is written are timed too.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from meshwise.executor.stages.parallelize import parallelize

MEGABYTES, ROUNDS, RANKS, LAYERS = 100, 8, 1, 16
ORDER = (False, True, True, False)
WARM_UP = 2


class Stack(nn.Module):
    """Linear maps whose parameters and two moments take so many megabytes."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        width = int((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def measure_rank(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the pauses and steps of this rank, in seconds."""
    torch.manual_seed(0)
    module = Stack(megabytes)
    width = module.layers[0].in_features
    step = parallelize(module, learning_rate=1e-4)
    batch = torch.randn(8, width)  # type: ignore[call-overload]
    step(batch)
    pauses: dict[bool, list[float]] = {False: [], True: []}
    steps: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds * len(ORDER)):
        in_background = ORDER[number % len(ORDER)]
        step.finish_saving()
        start = time.perf_counter()
        step(batch)
        steps[False].append(time.perf_counter() - start)
        start = time.perf_counter()
        step.save(folder, in_background=in_background)
        pauses[in_background].append(time.perf_counter() - start)
        if in_background:
            start = time.perf_counter()
            step(batch)
            steps[True].append(time.perf_counter() - start)
    step.finish_saving()
    blocking, beside = (pauses[kind][WARM_UP:] for kind in (False, True))
    return {
        "megabytes": 12 * sum(parameter.numel() for parameter in module.parameters()) / 1e6,
        "ranks": step.num_ranks,
        "pauses": {"at once": blocking, "beside": beside},
        "median": {"at once": median(blocking), "beside": median(beside)},
        "ratio": median(beside) / median(blocking),
        "step": {"alone": median(steps[False]), "beside": median(steps[True])},
    }


def _measure_forked(rank: int, megabytes: int, rounds: int, ranks: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    row = measure_rank(megabytes, rounds, Path(folder, "checkpoints"))
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(row))
    if ranks > 1:
        dist.destroy_process_group()


def measure(megabytes: int = MEGABYTES, rounds: int = ROUNDS, ranks: int = RANKS) -> dict[str, Any]:
    """Return the pauses and steps of rank 0."""
    with TemporaryDirectory() as folder:
        run = partial(_measure_forked, megabytes=megabytes, rounds=rounds, ranks=ranks, folder=folder)
        processes.spawn(run, nprocs=ranks)  # type: ignore[no-untyped-call]
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text())
    return row


def main(out: Path, sizes: list[int]) -> None:
    """Write what is measured, and print its medians."""
    row = measure(*sizes)
    out.write_text(json.dumps(row, indent=1) + "\n")
    at_once, beside = (1e3 * row["median"][kind] for kind in ("at once", "beside"))
    print(
        f"{row['megabytes']:.0f} MB, {row['ranks']} ranks: {at_once:.1f} ms at once, {beside:.1f} ms beside the steps,"
    )
    print(f"ratio {row['ratio']:.3f}; a step {1e3 * row['step']['alone']:.1f} ms, ", end="")
    print(f"{1e3 * row['step']['beside']:.1f} ms beside a checkpoint")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
