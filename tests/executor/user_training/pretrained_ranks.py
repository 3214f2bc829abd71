"""One rank that trains a folder of transformers in stages: ``python -m pretrained_ranks FOLDER MODEL``.

Losses, and what it has read of the folder's weights, go to ``FOLDER/found-RANK.json``.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.stages.parallelize import make_step, read_layout
from meshwise.executor.starting.construction import WholeModule
from meshwise.executor.starting.stored_values import StoredValues
from meshwise.executor.user_training.pretrained import start_model

PLANS = ("pipeline=2,num_microbatches=2", "pipeline=2,num_microbatches=2,data=2,zero=3")
STEPS = 3


def run(words: str, model: Path, *, is_whole: bool) -> dict[str, Any]:
    """Return losses, the names that were read with their elements, and the names of this rank's parameters."""
    counts: dict[str, int] = {}
    read, read_part = StoredValues.read, StoredValues.read_part

    def count_whole(self: StoredValues, name: str) -> Tensor:
        values = read(self, name)
        counts[name] = counts.get(name, 0) + values.numel()
        return values

    def count_part(self: StoredValues, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        values = read_part(self, name, offsets, sizes)
        counts[name] = counts.get(name, 0) + values.numel()
        return values

    start = start_model(model, 0)
    with patch.object(StoredValues, "read", count_whole), patch.object(StoredValues, "read_part", count_part):
        step = make_step(
            WholeModule(start.build()) if is_whole else start,
            read_layout(words),
            optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=0.01),
        )
        tokens = torch.randint(20, (8, 16), generator=torch.Generator().manual_seed(0))
        losses = [step.global_batch({"input_ids": tokens, "labels": tokens}) for _ in range(STEPS)]
    own = {name: parameter.numel() for name, parameter in step.module.named_parameters()}
    return {"losses": losses, "counts": counts, "own": own, "reason": step.whole_reason}


def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    with join_process_group(folder, 60.0):
        found = {
            words: {str(is_whole): run(words, model, is_whole=is_whole) for is_whole in (False, True)}
            for words in PLANS
            if read_layout(words).num_ranks == torch.distributed.get_world_size()
        }
        rank = torch.distributed.get_rank()
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, Path(sys.argv[2]))))
