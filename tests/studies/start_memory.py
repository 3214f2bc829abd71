"""The memory in which a rank starts under ZeRO 3, of a module that is given whole, or by the function that builds it.

Run ``python -m tests.studies.start_memory OUT.json [LAYERS] [RANKS] [WIDTH]``; by default the module has 1 GB in fp32
and 4 ranks. Peaks are those of the whole process by the kernel's count (``VmHWM``), less that of a process which has
trained a tiny module: once the module is given to `parallelize`; once it has its first values, as shards, and its loss
was checked on the first batch; and after the first step of SGD. Memory that is freed goes back to the kernel at once,
which the C library would else keep for later.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.executor.stages.parallelize import parallelize

LAYERS, RANKS, WIDTH, WORDS, LENGTH = 19, 4, 1024, 8192, 16
KINDS = ("whole", "built")
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""Environment variable with the bytes from which on memory is the kernel's, and goes back to it."""
MB = 1e6


class Layer(nn.Module):
    """The linear maps of a layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        nn.init.normal_(self.down.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    """A language model with tied tables."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def read_peak() -> int:
    """Return the most bytes that this process has had in main memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run_rank(rank: int, kind: str, layers: int, ranks: int, width: int, folder: str) -> None:
    """Start on one rank, and write its peaks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    tiny = parallelize(Language(1, 8), f"data={ranks},zero=3")  # loads what torch needs
    tokens = torch.randint(WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(rank))
    tiny(tokens)
    first_peak, start = read_peak(), time.perf_counter()
    build = partial(Language, layers, width)
    torch.manual_seed(0)
    module: Any = build() if kind == "whole" else build
    row: dict[str, float] = {}

    def build_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        row.update(start=read_peak() - first_peak, start_seconds=time.perf_counter() - start)
        return torch.optim.SGD(module.parameters())

    step = parallelize(module, f"data={ranks},zero=3", optimizer=build_optimizer)
    row["given"] = read_peak() - first_peak
    del module
    row["loss"] = step(tokens)
    row["step"] = read_peak() - first_peak
    count = sum(parameter.numel() for parameter in step.module.parameters())
    Path(folder, f"{rank}.json").write_text(json.dumps(row | {"bytes": 4 * count}))
    dist.barrier()
    dist.destroy_process_group()


def measure(kind: str, layers: int = LAYERS, ranks: int = RANKS, width: int = WIDTH) -> dict[str, float]:
    """Return the most that a rank has had, and the bytes of the module."""
    with TemporaryDirectory() as folder:
        os.environ |= {"OMP_NUM_THREADS": "1", THRESHOLD: "1000000"}
        processes.spawn(run_rank, (kind, layers, ranks, width, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: max(row[name] for row in rows) for name in rows[0]}


def main(arguments: Sequence[str]) -> None:
    """Measure both ways to start, and write the figures."""
    sizes = [int(argument) for argument in arguments[1:]]
    results = {kind: measure(kind, *sizes) for kind in KINDS}
    for kind, row in results.items():
        given, start, step = (f"{row[name] / MB:.0f} MB" for name in ("given", "start", "step"))
        print(
            f"{kind}: module {row['bytes'] / MB:.0f} MB; peak of a rank {given} once it is given, {start} with first "
            f"values ({row['start_seconds']:.1f} s), {step} after the first step",
            flush=True,
        )
    Path(arguments[0]).write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
