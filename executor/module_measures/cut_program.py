"""The program of a rank of a module whose operators are cut, with its messages, as it is measured: `CutProgram`."""

from contextlib import nullcontext
from dataclasses import replace
from math import prod

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwise.executor.cut_modules.captures import capture_batch, copy_structure, make_example, require_same_module
from meshwise.executor.cut_modules.plan_choice import keep_operator_axes
from meshwise.executor.module_measures.source import ModuleSource
from meshwise.executor.modules.batches import count_samples, list_tensors, map_tensors, select_samples
from meshwise.executor.modules.layout import list_operator_axes
from meshwise.executor.modules.quiet import KeepDouble
from meshwise.executor.modules.sharding import DTYPES, count_ranks
from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.stage_compiler import compile_stage
from meshwise.strategies.plan.mesh import DATA
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan


def build_rank_mesh(plan: Plan, device: torch.device) -> RankMesh:
    """Return the ranks over which a plan cuts operators; all ranks call this, and are in equally large groups."""
    axes = list_operator_axes(plan)
    mesh = init_device_mesh(
        device.type, (count_ranks() // prod(axes.values()), *axes.values()), mesh_dim_names=(DATA, *axes)
    )
    return RankMesh(mesh[tuple(axes)])


def count_operator_ranks(plan: Plan) -> int:
    """Return the number of ranks over which a plan cuts operators."""
    return prod(list_operator_axes(plan).values())


class CutProgram:
    """Both passes of a cut module on a microbatch, which all ranks of a group run together.

    Parameters
    ----------
    plan
        Its shardings cut the operators; what it says of other axes does not count.
    ranks
        Those of `build_rank_mesh`.
    num_samples
        Those of the microbatch; samples of this rank are repeated where it has fewer.

    Attributes
    ----------
    messages
        Seconds of messages of every run.
    """

    def __init__(self, source: ModuleSource, plan: Plan, ranks: RankMesh, num_samples: int) -> None:
        module, self.source = source.build(), source
        copies = -(-num_samples // count_samples(source.batch))
        repeated = map_tensors(source.batch, lambda tensor: torch.cat([tensor] * copies))
        batch = select_samples(repeated, 0, num_samples)
        nearest = f"data={count_ranks()}"
        with KeepDouble() if source.precision == "fp64" else nullcontext():
            captured = capture_batch(copy_structure(module), make_example(batch, 1), source.loss, nearest=nearest)
        whole = Stage(tuple(block for stage in plan.stages for block in stage.blocks))
        own_plan = replace(keep_operator_axes(plan), stages=(whole,), microbatch=num_samples, num_microbatches=1)
        require_same_module(own_plan, captured, module)
        self.stage = compile_stage(captured, module, own_plan, ranks, 0, source.device)
        tensors = list_tensors(batch)
        self.inputs = [tensors[place] for place in self.stage.input_places]
        self.messages: list[float] = []

    def run(self) -> None:
        """Run both passes, and sum the gradients that ranks share."""
        is_cast = DTYPES[self.source.precision].itemsize == 2
        context = torch.autocast(self.source.device.type, DTYPES[self.source.precision]) if is_cast else nullcontext()
        with context:
            loss = self.stage((), self.inputs)
        loss.backward()
        self.stage.sum_gradients()
        self.stage.zero_grad(set_to_none=True)
        records = self.stage.ranks.records
        self.messages.append(sum(record.end - record.start for record in records) * 1e-9)
        records.clear()
