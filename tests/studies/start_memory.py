"""The memory in which a rank starts under a plan, of a module that is given whole, or by the function that builds it.

Run ``python -m tests.studies.start_memory OUT.json [--plans PLAN ...] [--layers N] [--ranks N] [--width N]``. By
default the module has 1 GB in fp32, on 4 ranks, and plans are those of `PLANS`. Peaks are those of the whole process by
the kernel's count (``VmHWM``), less that of a process which has trained a tiny module: once the module is given to
`parallelize`; once it has its first values, as parts, and its loss was checked on the first batch; and after the first
step of SGD. Memory that is freed goes back to the kernel at once, which the C library would else keep for later.

With cut operators a module that is given whole is not measured: each rank would compare it with its program in fp64,
for which four ranks need 20 times its memory.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser
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

from meshwise.executor.recording.tensors import to_local
from meshwise.scenarios.module_plans.own_loop import parallelize

LAYERS, RANKS, WIDTH, WORDS, LENGTH, SAMPLES = 19, 4, 1024, 8192, 16, 4
KINDS = ("whole", "built")
ZERO = "data=4,zero=3"
PLANS = (
    ZERO,
    "pipeline=4,num_microbatches=4",
    "pipeline=2,num_microbatches=2,data=2,zero=3",
    "tensor=4",
    "pipeline=2,num_microbatches=2,tensor=2",
)
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


def run_rank(rank: int, kind: str, plan: str, layers: int, ranks: int, width: int, folder: str) -> None:
    """Start on one rank, and write its peaks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    tiny = parallelize(Language(2 * ranks, 8), plan)  # loads what torch needs
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    tiny.global_batch(tokens)
    first_peak, start = read_peak(), time.perf_counter()
    build = partial(Language, layers, width)
    torch.manual_seed(0)
    module: Any = build() if kind == "whole" else build
    row: dict[str, float] = {}

    def build_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        row.update(start=read_peak() - first_peak, start_seconds=time.perf_counter() - start)
        return torch.optim.SGD(module.parameters())

    step = parallelize(module, plan, optimizer=build_optimizer)
    row["given"] = read_peak() - first_peak
    del module
    row["loss"] = step.global_batch(tokens)
    row["step"] = read_peak() - first_peak
    sizes = torch.tensor([float(to_local(parameter).nbytes) for parameter in step.module.parameters()])
    row |= {"own": float(sizes.sum()), "bytes": count_bytes(layers, width)}
    Path(folder, f"{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def count_bytes(layers: int, width: int) -> int:
    """Return the bytes of the parameters of a module."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in Language(layers, width).parameters())


def measure(kind: str, plan: str, *, layers: int = LAYERS, ranks: int = RANKS, width: int = WIDTH) -> dict[str, float]:
    """Return the most that a rank has had, and the bytes of the module and of a rank's parts."""
    with TemporaryDirectory() as folder:
        os.environ |= {"OMP_NUM_THREADS": "1", THRESHOLD: "1000000"}
        processes.spawn(run_rank, (kind, plan, layers, ranks, width, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: max(row[name] for row in rows) for name in rows[0]}


def main(arguments: Sequence[str]) -> None:
    """Measure both ways to start under every plan, and write the figures."""
    parser = ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    for name, default in (("layers", LAYERS), ("ranks", RANKS), ("width", WIDTH)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args(arguments))
    out, plans = options.pop("out"), options.pop("plans")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for plan in plans:
        kinds = KINDS[1:] if "tensor" in plan else KINDS
        results[plan] = {kind: measure(kind, plan, **options) for kind in kinds}
        for kind, row in results[plan].items():
            names = ("bytes", "own", "given", "start", "step")
            size, own, given, start, step = (f"{row[name] / MB:.0f} MB" for name in names)
            print(
                f"{plan}, {kind}: module {size}, parts of a rank {own}; peak of a rank {given} once it is given, "
                f"{start} with first values ({row['start_seconds']:.1f} s), {step} after the first step",
                flush=True,
            )
    out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
