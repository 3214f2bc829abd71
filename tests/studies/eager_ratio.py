"""The step of `parallelize` beside scripts of torch by hand: DDP, FSDP2 and 1F1B of one model, by turns in one run.

Run ``python -m tests.studies.eager_ratio OUT.json [BLOCKS]``. Both sides train on the same two ranks in blocks of 20
steps, in the order A B B A; a pair of neighbouring blocks has one ratio. Of all pairs the median is told with its 95 %
interval, of wall time and of CPU time summed over ranks. An interval wider than 0.04 decides nothing.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import comb, nan
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.stages.parallelize import parallelize

STEPS, BLOCKS, RANKS = 20, 40, 2
WIDTH, HEADS, LAYERS, WORDS, LENGTH, BATCH, MICROBATCHES = 256, 4, 6, 512, 64, 8, 4
LIMITS = {"data=2": 1.03, "data=2,zero=3": 1.03, f"pipeline=2,num_microbatches={MICROBATCHES},cuts=layers.3": 1.05}
"""Words of a plan, and the ratio that is asked of it."""
WIDEST = 0.04
Step = Callable[[Tensor, Tensor], None]


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.first_norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Language(nn.Module):
    """A language model; ``first`` and ``end`` choose layers, as a script of a pipeline builds one stage."""

    def __init__(self, first: int = 0, end: int = LAYERS) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if first == 0 else None
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(first, end)})
        self.head = nn.Linear(WIDTH, WORDS) if end == LAYERS else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = x if self.words is None else self.words(x)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.head is None else self.head(x)
        return x if targets is None else compute_loss(x, targets)


def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build_script(words: str, rank: int) -> Step:
    """Return the step that a script by hand has for the words of a plan."""
    torch.manual_seed(0)
    if words.startswith("pipeline"):
        return _build_pipeline(rank)
    module: nn.Module = Language()
    if "zero" in words:
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in module.layers.values():  # type: ignore[union-attr, operator]
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        module = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss = compute_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)  # a script tells the loss of the batch
        mean.item()

    return step


def _build_pipeline(rank: int) -> Step:
    module = Language(0, LAYERS // 2) if rank == 0 else Language(LAYERS // 2, LAYERS)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=compute_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(mean, RANKS - 1)
        mean.item()

    return step


class PairedTimes(NamedTuple):
    """Seconds of one block of each side, of the slowest rank or of all ranks together."""

    ours: float
    theirs: float


def run_rank(rank: int, words: str, num_blocks: int, folder: str) -> None:
    """Run all blocks on a rank; rank 0 writes the times of pairs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    ours = parallelize(Language(), words)
    script = build_script(words, rank)
    data_rank = 0 if words.startswith("pipeline") else rank
    share = BATCH if words.startswith("pipeline") else BATCH // RANKS
    tokens = torch.randint(WORDS, (share, LENGTH + 1), generator=torch.Generator().manual_seed(data_rank))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    sides: tuple[Callable[[], object], ...] = (lambda: ours(batch), lambda: script(*batch))
    for side in (*sides, *sides):  # first steps build what later ones use
        side()
    rows = []
    for number in range(num_blocks):
        order = sides if number % 2 == 0 else sides[::-1]
        times = []
        for side in order:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                side()
            seconds = torch.tensor([time.perf_counter() - start, time.process_time() - cpu_start], dtype=torch.float64)
            slowest, total = seconds.clone(), seconds
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            times.append((slowest[0].item(), total[1].item()))
        rows.append(times if number % 2 == 0 else times[::-1])
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


class Ratio(NamedTuple):
    """The median of paired ratios, and the ends of its 95 % interval."""

    median: float
    low: float
    high: float

    def judge(self, limit: float) -> str:
        """Return whether a limit is met, or that the interval is too wide to say."""
        if not self.high - self.low <= WIDEST:
            return "not decided"
        return "met" if self.median <= limit else "not met"


def compute_ratio(ratios: Sequence[float]) -> Ratio:
    """Return the median of ratios with the interval of order statistics that covers it with at least 95 %.

    The number of ratios below the true median is binomial with 1/2, whatever their distribution.

    >>> compute_ratio([1.0, 1.1, 1.2])  # three ratios have no such interval
    Ratio(median=1.1, low=nan, high=nan)
    >>> compute_ratio([float(n) for n in range(1, 7)])  # all six are on one side with 2 / 64
    Ratio(median=3.5, low=1.0, high=6.0)
    """
    ordered, count = sorted(ratios), len(ratios)
    tail, place = 0.0, -1
    while place + 1 < count // 2 and 2 * (tail + comb(count, place + 1) / 2**count) <= 0.05:
        place += 1
        tail += comb(count, place) / 2**count
    if place < 0:
        return Ratio(median(ordered), nan, nan)
    return Ratio(median(ordered), ordered[place], ordered[count - 1 - place])


def compare(words: str, num_blocks: int) -> dict[str, object]:
    """Return ratios of a plan, of wall and CPU time, with all pairs."""
    with TemporaryDirectory() as folder:
        processes.spawn(run_rank, (words, num_blocks, folder), nprocs=RANKS)  # type: ignore[no-untyped-call]
        rows = json.loads(Path(folder, "times.json").read_text())
    result: dict[str, object] = {"plan": words, "limit": LIMITS[words], "pairs": rows}
    for place, name in enumerate(("wall", "cpu")):
        pairs = [PairedTimes(ours[place], theirs[place]) for ours, theirs in rows]
        ratio = compute_ratio([pair.ours / pair.theirs for pair in pairs])
        seconds = [median(side) / STEPS for side in zip(*pairs, strict=True)]
        verdict = ratio.judge(LIMITS[words])
        print(
            f"{words}: {name} {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], {1e3 * seconds[0]:.1f} and "
            f"{1e3 * seconds[1]:.1f} ms a step: {verdict} (at most {LIMITS[words]})",
            flush=True,
        )
        result[name] = {**ratio._asdict(), "verdict": verdict}
    return result


def main(arguments: Sequence[str]) -> None:
    """Compare all plans and write the pairs."""
    num_blocks = int(arguments[1]) if len(arguments) > 1 else BLOCKS
    os.environ["OMP_NUM_THREADS"] = "1"
    results = [compare(words, num_blocks) for words in LIMITS]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"date": now, "torch": torch.__version__, "steps": STEPS, "results": results}
    Path(arguments[0]).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
