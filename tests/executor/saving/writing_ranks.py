"""One rank that writes checkpoints beside its steps: ``python -m writing_ranks FOLDER MEGABYTES STEPS``.

``FOLDER/begun`` has the step whose checkpoint is under way, and whose states all are this number.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.stages.parallelize import parallelize


class Numbers(nn.Module):
    """A module whose parameters count steps under SGD with a rate of 1."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(count // 8)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -sum(value.sum() for value in self.values) * x.mean()


def build_step(megabytes: int) -> "object":
    return parallelize(
        Numbers(megabytes * 2**18), "data=2,zero=1", optimizer=lambda m: torch.optim.SGD(m.parameters(), 1.0)
    )


def main(folder: Path, megabytes: int, steps: int, rank: int) -> None:
    torch.set_num_threads(1)
    with join_process_group(folder, 60.0):
        step = build_step(megabytes)
        for number in range(1, steps + 1):
            step(torch.ones(1, 1))
            step.save(folder / "checkpoints", in_background=True)
            if rank == 0:
                (folder / "begun").write_text(str(number))
        step.finish_saving()


if __name__ == "__main__":
    here, sizes = Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(run_rank(here, lambda rank: main(here, *sizes, rank)))
