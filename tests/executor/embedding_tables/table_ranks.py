"""One rank that trains recommenders under many plans in one process group: ``python -m table_ranks FOLDER``.

``FOLDER/cases.json`` has them; what each rank found goes to ``FOLDER/found-RANK.json``.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import recommenders
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from meshwise.executor.embedding_tables import cut_table, gradients
from meshwise.executor.embedding_tables import step as step_of_tables
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.modules.batches import to_double
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.recording.weight_files import read_weights
from meshwise.executor.stages.parallelize import parallelize
from meshwise.executor.starting.construction import make_start

STEPS = 4


def batches() -> list[Any]:
    numbers = [range(first, first + recommenders.BATCH) for first in range(0, 100, recommenders.BATCH)][:STEPS]
    return [to_double(default_collate([recommenders.draw_sample(n) for n in row])) for row in numbers]


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return recommenders.KINDS[kind]().double()


def start(case: dict[str, Any]) -> Any:
    """Return the start of a module that is there, or of one that is built without its parameters."""
    kind = case["kind"]
    return make_start(build(kind) if case.get("is_live") else partial(build, kind), 0)


def train_plainly(case: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the weights of a loop of torch alone."""
    module, losses = start(case).build(), []
    optimizer = recommenders.OPTIMIZERS[case["optimizer"]](module)
    for batch in batches():
        value = module(*batch)
        loss = value[0] / value[1] if isinstance(value, tuple) else value
        loss.backward()
        found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        if "max_norm" in case:
            norm = sum(float(gradient.to_dense().square().sum()) for gradient in found) ** 0.5
            assert norm > case["max_norm"]
            for gradient in found:
                gradient.mul_(case["max_norm"] / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, module.state_dict()


def clip_alone(own_gradients: Any, parts: Any, max_norm: float, device: torch.device) -> None:
    factor = max_norm / float(gradients.sum_squares(own_gradients, device)) ** 0.5
    for gradient in own_gradients:
        gradient.mul_(factor)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "gradients are a sum": (
        cut_table.CutTable,
        "_give_gradient",
        lambda self, rows, values, give=cut_table.CutTable._give_gradient: give(self, rows, 2 * values),
    ),
    "norms are of one rank": (step_of_tables, "clip_parts", clip_alone),
}


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return how far steps under a plan, and a second one from a checkpoint, are from a loop of torch."""
    losses, expected = train_plainly(case)
    options: dict[str, Any] = {"optimizer": recommenders.OPTIMIZERS[case["optimizer"]], "precision": "fp64"}
    options["max_norm"] = case.get("max_norm")
    found: list[float] = []
    owner, name, replacement = FAULTS.get(case.get("fault", ""), (cut_table, "Lookup", cut_table.Lookup))
    plans = case["plans"]
    with patch.object(owner, name, replacement):
        for place, words in enumerate(plans):
            source = partial(build, case["kind"])
            step = parallelize(source() if case.get("is_live") else source, words, **options)
            if place:
                step.load(folder)
            end = STEPS * (place + 1) // len(plans)
            found += [step.global_batch(batch) for batch in batches()[step.step_number : end]]
            step.save(folder)
    own = sum(parameter.numel() for parameter in step.module.parameters())
    evaluation = step.evaluate(batches=[batches()[0]])
    step.export(folder / "weights", is_plain=True)
    dist.barrier()
    weights = read_weights(folder / "weights")
    dist.barrier()
    assert weights.keys() == expected.keys()
    return {
        "losses": max(abs(one - other) for one, other in zip(losses, found, strict=True)),
        "weights": max(float((weights[name] - expected[name]).abs().max()) for name in weights),
        "share": own / sum(tensor.numel() for tensor in weights.values()),
        "evaluation": evaluation["loss"],
        "states": sum(
            state.numel() for row in step.optimizer_states for state in row.values() if isinstance(state, torch.Tensor)
        ),
        "words": step.table_words,
    }


def refuse(case: dict[str, Any]) -> str:
    """Return why a step cannot begin."""
    step = parallelize(
        build(case["kind"]), case["plans"][0], precision="fp64", optimizer=recommenders.OPTIMIZERS[case["optimizer"]]
    )
    try:
        step.global_batch(batches()[0])
    except UserError as error:
        return str(error)
    return ""


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    found: list[Any] = []
    with join_process_group(folder, 60.0):
        for place, case in enumerate(cases):
            found.append(refuse(case) if case.get("is_refused") else run(case, folder / str(place)))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, rank)))
