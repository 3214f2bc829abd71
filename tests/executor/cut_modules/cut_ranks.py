"""One rank that trains many networks under cuts in one process group: ``python -m cut_ranks FOLDER``.

``FOLDER/cases.json`` has them; what each rank found goes to ``FOLDER/found-RANK.json``.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import networks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwise.executor.cut_modules.cut_stages import CutStagesStep, make_cut_step
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.modules.batches import split_evenly, to_double
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.losses import call_module, read_loss
from meshwise.executor.modules.quiet import KeepDouble, turn_to_double
from meshwise.executor.operators import calls, collectives, cut_attention, cut_experts, stage_compiler
from meshwise.executor.operators.local_stage import LocalStage
from meshwise.executor.recording.weight_files import read_weights
from meshwise.scenarios.module_plans.own_loop import parallelize

STEPS = 3


def whole_gradient(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
    return (*gradients, None, None)


def whole_gradient_once(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
    return (*gradients, None)


def add_bias(context: Any, bias: Tensor, counts: bool) -> Tensor:
    return bias.view_as(bias)


def own_part(self: collectives.RankMesh, part: Tensor, axis: str, group: Any = None) -> Tensor:
    return part.clone()


def first_part(self: collectives.RankMesh, part: Tensor, index: int, axis: str) -> Tensor:
    return part.chunk(self.size[axis], index)[0]


def attend_first_rows(part: int, *arguments: Any, **options: Any) -> Tensor:
    return ATTEND_ROWS(0, *arguments, **options)


def multiply_first_experts(product: Any, part: int, *arguments: Any, **options: Any) -> Tensor:
    return MULTIPLY_EXPERTS(product, 0, *arguments, **options)


ATTEND_ROWS, MULTIPLY_EXPERTS = cut_attention.attend_rows, cut_experts.multiply_experts
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "gradients are not summed": (LocalStage, "sum_gradients", lambda self: None),
    "gradients of values do not go back": (calls.Move, "backward", staticmethod(whole_gradient)),
    "a bias is added on every rank": (collectives.SingleBias, "forward", staticmethod(add_bias)),
    "sums are of one rank": (collectives.RankMesh, "all_reduce", own_part),
    "all ranks have the first part": (collectives.RankMesh, "_cut", first_part),
    "a gradient counts twice": (calls.Share, "backward", staticmethod(whole_gradient_once)),
    "gradients of parts are not summed": (CutStagesStep, "_sum_parts", lambda self: None),
    "norms count copies": (CutStagesStep, "_count_copies", lambda self, name: 1),
    "queries see the keys of the first ones": (cut_attention, "attend_rows", attend_first_rows),
    "all ranks have the rows of the first experts": (cut_experts, "multiply_experts", multiply_first_experts),
    "buffers are not renewed": (stage_compiler, "make_renewal", lambda *_: lambda *values: None),
}


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Run the body with a fault in what ranks compute."""
    if not fault:
        yield
        return
    owner, name, replacement = FAULTS[fault]
    with patch.object(owner, name, replacement):
        yield


def batches(kind: str) -> list[Any]:
    """Return the global batches of all steps."""
    draw = networks.KINDS[kind][1]
    numbers = [range(first, first + networks.BATCH) for first in range(0, STEPS * networks.BATCH, networks.BATCH)]
    found = [default_collate([draw(torch.Generator().manual_seed(n)) for n in row]) for row in numbers]
    return [to_double(batch) for batch in found]


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    module = networks.KINDS[kind][0]()
    turn_to_double(module)
    return module.train()


def find_loss(kind: str) -> Any:
    return (lambda outputs, batch: nn.functional.mse_loss(outputs, batch["y"])) if kind == "perceptron" else None


def train_plainly(kind: str, max_norm: float | None) -> tuple[list[float], nn.Module]:
    """Return the losses of a loop of torch alone, and its module."""
    module, losses = build(kind), []
    optimizer = networks.optimizer(module)
    scheduler = networks.scheduler(optimizer)
    for batch in batches(kind):
        with KeepDouble():
            value = read_loss(call_module(module, batch), batch, find_loss(kind))
        loss = value.total if value.weight is None else value.total / value.weight
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, module


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return how far the steps of a case are from a loop of torch, and which part of the parameters a rank has."""
    kind, max_norm = case["kind"], case.get("max_norm")
    losses, expected = train_plainly(kind, max_norm)
    with broken(case.get("fault", "")):
        options: dict[str, Any] = {"optimizer": networks.optimizer, "scheduler": networks.scheduler}
        options |= {"loss": find_loss(kind), "precision": "fp64", "max_norm": max_norm}
        if "words" in case:  # as in a loop of the user's own
            step = parallelize(build(kind), case["words"], **options)
        else:
            layout = ModuleLayout.from_json(case["layout"])
            step = make_cut_step(build(kind), layout, device=torch.device("cpu"), **options)
        try:
            found = [step.global_batch(batch) for batch in batches(kind)]
        except RuntimeError:  # of autograd, on all ranks at once: a fault that shows at once
            if not case.get("fault"):
                raise
            return {"losses": inf, "weights": inf}
        own = sum(parameter.numel() for parameter in step.module.parameters())
    step.export(folder / "weights", is_plain=True)
    dist.barrier()
    weights = read_weights(folder / "weights")
    dist.barrier()
    whole = dict(expected.state_dict())
    errors = [float((weights[name] - whole[name]).double().abs().max()) for name in weights]
    return {
        "losses": max(abs(one - other) for one, other in zip(losses, found, strict=True)),
        "weights": max(errors, default=0.0),
        "names": sorted(set(whole) ^ set(weights)),
        "share": own / sum(parameter.numel() for parameter in expected.parameters()),
    }


def draw_twice(case: dict[str, Any]) -> list[list[float]]:
    """Return the losses of two runs with dropout from one seed, and of one from another, with a step of zeros."""
    result = []
    for seed in (0, 0, 1):
        options: dict[str, Any] = {"optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.0)}
        layout = ModuleLayout.from_json(case["layout"])
        step = make_cut_step(
            build("dropout"), layout, device=torch.device("cpu"), precision="fp64", seed=seed, **options
        )
        batch = split_evenly(batches("dropout")[0], layout.data, "ranks")[layout.find_data_part(dist.get_rank())]
        result.append([step(batch) for _ in range(2)])
    return result


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    found: list[Any] = []
    with join_process_group(folder, 60.0):
        for case in cases:
            found.append(draw_twice(case) if case["kind"] == "dropout" else run(case, folder))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, rank)))
