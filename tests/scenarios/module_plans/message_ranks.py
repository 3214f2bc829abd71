"""One rank that records the messages of a step under many layouts: ``python -m message_ranks FOLDER``.

``FOLDER/layouts.json`` has the layouts, ``FOLDER/mine.py`` the module; what rank N sent goes to ``FOLDER/sent-N.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from meshwise.executor.check.messages import MessageRecorder
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.scenarios.module_plans.own_loop import parallelize


def record_step(layout: ModuleLayout, file: Any) -> list[tuple[str, tuple[int, ...], int]]:
    """Return the messages of a third step: in the first ones groups and buckets are made."""
    torch.manual_seed(0)
    step = parallelize(file.model(), layout)
    batch = tuple(torch.stack(items) for items in zip(*(file.data()[n] for n in range(file.BATCH)), strict=True))
    for _ in range(2):
        step.global_batch(batch)
    with MessageRecorder() as recorder:
        step.global_batch(batch)
    return [(message.kind, message.ranks, message.size) for message in recorder.messages]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    layouts = json.loads((folder / "layouts.json").read_text())
    sys.path.insert(0, str(folder))
    import mine

    with join_process_group(folder, 60.0):
        sent = [record_step(ModuleLayout.from_json(layout), mine) for layout in layouts]
    (folder / f"sent-{rank}.json").write_text(json.dumps(sent))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, rank)))
