"""A page of the documentation: operator parallelism of one MLP, from the module to the picture of its plan.

Run ``python -m tests.studies.operator_walk docs`` to write ``docs/operator_parallelism.md`` and its
picture.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from textwrap import wrap
from typing import Any

from meshwise.reports.pictures.sharded_graph import draw_sharded_graph
from meshwise.scenarios.files.library import find_root
from meshwise.scenarios.loader import load
from meshwise.simulator.operator_graph import Operator
from meshwise.simulator.units import format_size, format_time, to_seconds
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.lowering.costs.operator import build_collectives
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.timing import chain_ticks
from meshwise.strategies.operators.choices import Pin, list_choices, list_cuttable_dims
from meshwise.strategies.operators.cost_graph import Edge, Solution
from meshwise.strategies.operators.costs import OperatorCosts, compute_operator_costs
from meshwise.strategies.operators.operator_plan import Degrees, build_operator_plan
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.sharding import OperatorSharding, ShardingSpec
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.driver import SearchResult
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ..strategies.operators.brute_force import brute_force

PAGE, PICTURE = "operator_parallelism.md", "operator-parallelism.png"
SCENARIO = "operators/mlp"
ONE_AXIS: Degrees = {TENSOR: 8}
TWO_AXES: Degrees = {TENSOR_ROWS: 2, TENSOR: 4}
SEED = Pin("up.up", (("ffn", (TENSOR,)),))
OWN = Pin("down.down", (("features", (TENSOR,)),))
BATCHES = (512, 4096, 16384, 65536)
LARGE = 65536
ROOMS = (1.6, 1.45, 1.4)
"""Memory of a device in GiB, of which the runtime reserves 1."""
RUNS: tuple[tuple[str, dict[str, Any], Space], ...] = (
    ("frontier", {}, Space()),
    ("integer_programming", {}, Space()),
    ("dynamic_programming", {}, Space()),
    ("dynamic_programming", {"faithful": True}, Space()),
    ("recursive_programming", {}, Space()),
    ("recursive_programming", {"faithful": True}, Space()),
    ("sharding_propagation", {}, Space(pin=(SEED,))),
    ("sharding_propagation", {"faithful": True}, Space(pin=(SEED,))),
)
REDISTRIBUTIONS: tuple[tuple[Degrees, ShardingSpec, ShardingSpec], ...] = (
    (ONE_AXIS, ShardingSpec(), ShardingSpec((("ffn", (TENSOR,)),))),
    (ONE_AXIS, ShardingSpec((("ffn", (TENSOR,)),)), ShardingSpec()),
    (ONE_AXIS, ShardingSpec((("batch", (TENSOR,)),)), ShardingSpec((("ffn", (TENSOR,)),))),
    (ONE_AXIS, ShardingSpec((), (TENSOR,)), ShardingSpec()),
    (ONE_AXIS, ShardingSpec((), (TENSOR,)), ShardingSpec((("batch", (TENSOR,)),))),
    (
        TWO_AXES,
        ShardingSpec((("batch", (TENSOR_ROWS, TENSOR)),)),
        ShardingSpec((("batch", (TENSOR_ROWS,)), ("ffn", (TENSOR,)))),
    ),
    (TWO_AXES, ShardingSpec((("batch", (TENSOR_ROWS, TENSOR)),)), ShardingSpec((("batch", (TENSOR,)),))),
    (TWO_AXES, ShardingSpec((("batch", (TENSOR_ROWS,)),), (TENSOR,)), ShardingSpec((("ffn", (TENSOR_ROWS, TENSOR)),))),
)


class Walk:
    """The page on the library's MLP, with its costs and plans."""

    def __init__(self) -> None:
        self.scenario = load(SCENARIO)
        self.problem: Problem = self.scenario.problem
        self.batch = self.problem.training.global_batch

    @cached_property
    def costs(self) -> OperatorCosts:
        """The costs of all shardings on a mesh whose one axis has all devices."""
        return compute_operator_costs(self.problem, ONE_AXIS, self.batch)

    @cached_property
    def results(self) -> tuple[SearchResult, ...]:
        """The search result of every algorithm in `RUNS`."""
        return tuple(search(ALGORITHMS[name](**options), self.problem, space) for name, options, space in RUNS)

    @cached_property
    def plan(self) -> Plan:
        """The plan that the page shows: the one of the first algorithm."""
        return _unpack_best(self.results[0])[0]

    def format_page(self) -> str:
        """Return the page as Markdown."""
        parts = (
            self._module(),
            self._choices(),
            self._redistributions(),
            self._edge(),
            self._algorithms(),
            self._pins(),
            self._memory(),
            self._picture(),
            self._execution(),
        )
        head = ("# Operator parallelism: one MLP, from module to plan", "")
        intro = _wrap_prose(
            "Every operator has its own sharding; where two neighbours disagree, the tensor between them is",
            "redistributed. This page follows one small module through that. "
            "`python -m tests.studies.operator_walk docs` writes it:",
            "every figure is the program's, on a simulated node of 8 H100, and a test compares them.",
        )
        return "\n".join((*head, *intro, *(line for part in parts for line in part)))

    def _module(self) -> Iterator[str]:
        yield from ("## The module, and what capture makes of it", "", "```python")
        yield from (find_root() / "operators" / "mlp.py").read_text("utf-8").split('"""\n', 1)[1].strip().splitlines()
        yield from ("```", "", f"    meshwise capture {_MODULE} --out mlp.json", "")
        graph = self.problem.graph
        yield (
            f"The graph file is data: simulation and search of it need no torch. {graph.num_parameters:,} parameters,"
        )
        yield from _wrap_prose(
            f"{graph.flops / 1e6:.1f} MFLOP forward a sample; its {len(self.costs.nodes)} operators, of one",
            "sample:",
        )
        yield from _format_table(("operator", "kind", "dims", "parameters", "MFLOP", "may be cut"), self._operators())

    def _operators(self) -> Iterator[tuple[str, ...]]:
        for node in self.costs.nodes:
            block, operator = node.block, node.operator
            dims = ", ".join(f"{_describe_sum(operator, dim)} {size}" for dim, size in operator.dims)
            flops = operator.flops_per_point * prod(size for _, size in operator.dims) / 1e6
            weights = (f"{name} {list(block.tensor[name].shape)}" for name in operator.parameters)
            yield (
                f"`{node.name}`",
                str(operator.kind),
                dims,
                ", ".join(weights),
                f"{flops:.1f}" if flops else "",
                ", ".join(list_cuttable_dims(block, operator)),
            )

    def _choices(self) -> Iterator[str]:
        node, node_choices = self.costs.nodes[0], self.costs.choices[0]
        block, operator = node.block, node.operator
        yield from ("## The legal shardings of one operator", "")
        yield from _wrap_prose(
            "An axis of the mesh cuts one dim of an operator or none: a dim that the result has into",
            "independent parts, one that is summed (*in italics* above) into parts whose results are partial.",
            f"Everything else follows. On one axis of 8 ranks `{node.name}` has {len(node_choices)} shardings.",
            "`[ffn/tensor]` is a tensor of which each rank along `tensor` has a part of `ffn`, `[]` one that",
            "every rank has whole:",
        )
        rows = []
        for sharding, ticks, kept_bytes in zip(
            node_choices, self.costs.graph.times[0], self.costs.graph.kept_bytes[0], strict=True
        ):
            x, weight, up = (block.tensor[name] for name in ("x", "weight", "up"))
            rows.append(
                (
                    _describe_cuts(sharding),
                    f"`{sharding.find_input_spec(x)}`",
                    f"`{sharding.find_kept_spec(weight)}`",
                    f"`{sharding.find_output_spec(operator, up)}`",
                    f"`{sharding.find_gradient_spec(weight)}`",
                    _format_ticks(int(ticks)),
                    format_size(int(kept_bytes)),
                )
            )
        head = ("sharding", "reads x", "keeps weight", "makes up", "gradient of weight", "time", "memory")
        yield from _format_table(head, rows)
        yield from _wrap_prose(
            "The time is forward, backward, the operator's own collectives, the sum of its gradients and its",
            "update; the memory is weights, gradients, optimizer states and what backward reads. *Kept cut* is",
            "what ZeRO 3 does: each rank keeps a part of the weight, which is gathered for each pass; its",
            "gradient is scattered.",
        )
        num_combinations = prod(map(len, self.costs.choices))
        num_on_two = prod(
            len(list_choices(n.block.name, n.block, n.operator, TWO_AXES, self.batch)) for n in self.costs.nodes
        )
        yield from _wrap_prose(
            f"All operators together have {num_combinations:,} combinations on `tensor(8)`, and {num_on_two:,} on",
            "`tensor_rows(2) x tensor(4)`.",
        )

    def _redistributions(self) -> Iterator[str]:
        layout = self._layout(ONE_AXIS)
        yield from ("## Redistribution", "")
        yield from _wrap_prose(
            f"`gelu` is [{self.batch}, 8192] in bf16, {format_size(layout.tensor_bytes('gelu'))}. What brings it",
            "from one layout to another is a fixed sequence of collectives, the one that the executor runs. Of",
            "several axes that cut a dim each cuts the parts of those before it, so only the last one can",
            "leave:",
        )
        head = ("mesh", "from", "to", "collectives", "time")
        yield from _format_table(head, (self._redistribution(*layouts) for layouts in REDISTRIBUTIONS))

    def _redistribution(self, degrees: Degrees, source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
        costs, plan = StageCosts(self.problem), build_operator_plan(self.problem, degrees, self.batch)
        clock = costs.clock(costs.machine(plan).rank(0))
        steps = build_collectives(self._layout(degrees), "gelu", source, target)
        words = (f"{_format_kind(step.collective)} of {format_size(step.size)} along {step.axis}" for step in steps)
        mesh = " x ".join(f"{axis}({size})" for axis, size in degrees.items())
        text = ", ".join(words) or "none: each rank keeps its part"
        return mesh, f"`{source}`", f"`{target}`", text, _format_ticks(chain_ticks(clock.time_segments(steps)))

    def _layout(self, degrees: Degrees) -> BlockLayout:
        plan = build_operator_plan(self.problem, degrees, self.batch)
        return BlockLayout(self.problem.graph.blocks[0], plan.mesh, {}, self.batch)

    def _edge(self) -> Iterator[str]:
        edge = self._edge_between("up.up", "up.gelu")
        yield from ("## The cost table of one edge", "")
        yield from _wrap_prose(
            "Between every two neighbours there is a table of what redistribution costs, of the tensor forward",
            "and of its gradient backward; rows are shardings of `up.up`, columns those of `up.gelu`. Sums of",
            "entries of such tables and of the times above are what the algorithms minimise:",
        )
        head = ("up.up \\ up.gelu", *map(_describe_cuts, self.costs.choices[edge.target]))
        source_choices = self.costs.choices[edge.source]
        rows = (
            (_describe_cuts(choice), *(_format_ticks(int(ticks)) for ticks in row))
            for choice, row in zip(source_choices, edge.times, strict=True)
        )
        yield from _format_table(head, rows)

    def _edge_between(self, source: str, target: str) -> Edge:
        names = [node.name for node in self.costs.nodes]
        return next(
            edge for edge in self.costs.graph.edges if (names[edge.source], names[edge.target]) == (source, target)
        )

    def _algorithms(self) -> Iterator[str]:
        best = brute_force(self.costs.graph, self.costs.limit)
        assert isinstance(best, Solution)
        data = self.scenario.simulate()
        yield from ("## What each algorithm chooses", "")
        yield from _wrap_prose(
            "Each algorithm chooses on every arrangement of the 8 devices, the plans are simulated, and the",
            f"fastest is kept. Data parallelism, the scenario's own plan, takes {format_time(data.step_time)}",
            f"and {format_size(data.peak_memory)}:",
        )
        head = ("algorithm", "mesh", "shardings", "simulated step", "peak memory")
        yield from _format_table(
            head,
            (
                _build_row(*algorithm_run[:2], search_result)
                for algorithm_run, search_result in zip(RUNS, self.results, strict=True)
            ),
        )
        least, step = _format_ticks(best.time), format_time(_unpack_best(self.results[0])[1])
        yield from _wrap_prose(
            f"Brute force over all combinations on `tensor(8)` finds the same least sum of costs, {least}, as",
            f"`frontier`; its simulated step is {step}. `up` is cut along its outputs and `down` along what it",
            "sums, so that nothing moves between them: Megatron's column and row, which no rule here knows.",
            "`sharding_propagation` starts from `up.up: {ffn: tensor}`. `recursive_programming` compares",
            "bytes and knows no latencies: it cuts the loss too; as published it halves the machine level by",
            "level.",
        )

    def _pins(self) -> Iterator[str]:
        search_result = search(ALGORITHMS["frontier"](), self.problem, Space(pin=(OWN,)))
        plan, step, _ = _unpack_best(search_result)
        yield from ("## Deciding an operator yourself", "", "```yaml", "search:", "  algorithm: frontier", "  pin:")
        yield from (
            "    down.down: {features: tensor}   # or, in the order of what may be cut: [null, tensor]",
            "```",
            "",
        )
        yield from _wrap_prose(
            f"The rest is chosen around it: {_describe_shardings(plan)}. The step takes {format_time(step)}:",
            "`down` now reads all of `gelu`, which is gathered. A pin of `layers.attention` holds for all layers,",
            "one of `layers.0.attention` for one.",
        )

    def _memory(self) -> Iterator[str]:
        yield from ("## When the batch grows, and when memory binds", "")
        yield from _wrap_prose(
            "Tensor parallelism moves activations, data parallelism gradients: `frontier` changes from one to the",
            "other as the batch grows (no shardings are left where all is data parallel). With less memory on each",
            "device microbatches become smaller, parameters are kept cut, as ZeRO 3 keeps them, and operators are cut",
            "in the end, so that a device has a part of each:",
        )
        head = ("batch", "memory of a device", "mesh", "shardings", "simulated step", "peak memory")
        full_memory = self.problem.cluster.accelerator.memory
        cases = [*((batch, full_memory) for batch in BATCHES), *((LARGE, room * 2**30) for room in ROOMS)]
        yield from _format_table(head, (self._build_case_row(*memory_case) for memory_case in cases))

    def _build_case_row(self, batch: int, memory: float) -> tuple[str, ...]:
        cluster = self.problem.cluster
        node = replace(cluster.first_node, accelerator=replace(cluster.accelerator, memory=memory))
        machine = replace(cluster, nodes=((node, cluster.num_nodes),))
        training = replace(self.problem.training, global_batch=batch)
        problem = replace(self.problem, cluster=machine, training=training)
        search_result = search(ALGORITHMS["frontier"](), problem)
        _, *row = _build_row("frontier", {}, search_result)
        return (f"{batch:,}", format_size(memory), *row)

    def _picture(self) -> Iterator[str]:
        yield from ("## The plan as a picture", "")
        yield from _wrap_prose(
            "What `frontier` chose, drawn by",
            "`meshwise.reports.pictures.sharded_graph.draw_sharded_graph(graph, plan, path)`:",
            "how each operator is cut, and the collectives on each edge with their bytes, forward (down) and",
            "backward (up):",
        )
        yield from (f"![Every operator of the MLP, its cut, and what moves between operators]({PICTURE})", "")

    def _execution(self) -> Iterator[str]:
        yield from ("## Running it", "")
        yield from _wrap_prose(
            "The same graph on two processes of this machine: searched for, run on torch's collectives",
            "with exactly the collectives that were simulated, and compared with one process in fp64:",
        )
        yield from (f"<!-- {_NOT_RUN} -->", "")
        yield "    meshwise search operators/mlp-2-processes --out plan.json"
        yield f"    meshwise execute operators/mlp-2-processes --plan plan.json --module {_MODULE} --verify"
        yield ""
        yield from _wrap_prose(
            "The line `verified` says whether loss, gradients and parameters are those of one process, and by",
            "how much they differ.",
        )


_MODULE = "scenarios/operators/mlp.py:mlp"
_NOT_RUN = "not run: takes a minute of two cores; tests/executor/operators/test_run.py runs smaller ones"


def _build_row(name: str, options: Mapping[str, Any], search_result: SearchResult) -> tuple[str, ...]:
    label = f"`{name}`" + "".join(f", {key}" for key in options)
    plan, step, memory = _unpack_best(search_result)
    mesh = " x ".join(f"{axis.name}({axis.size})" for axis in plan.mesh.axes if axis.size > 1)
    zero = f", ZeRO {plan.zero}" if plan.zero else ""
    zero += f", {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else ""
    return label, mesh + zero, _describe_shardings(plan), format_time(step), format_size(memory)


def _unpack_best(search_result: SearchResult) -> tuple[Plan, float, float]:
    assert search_result.best is not None
    return search_result.best.plan, search_result.best.evaluation.step_time, search_result.best.evaluation.peak_memory


def _describe_shardings(plan: Plan) -> str:
    """Return the shardings of a plan in words: operators with equal cuts together, those without cuts last."""
    operators_by_cuts: dict[str, list[str]] = {}
    for sharding in sorted(plan.shardings, key=lambda candidate: not candidate.cuts):
        operators_by_cuts.setdefault(_describe_cuts(sharding), []).append(sharding.operator.rsplit(".", 1)[-1])
    return "; ".join(f"{', '.join(names)}: {label}" for label, names in operators_by_cuts.items()) or "none"


def _describe_cuts(sharding: OperatorSharding) -> str:
    cuts = ", ".join(f"{dim}/{'*'.join(axes)}" for dim, axes in sharding.cuts)
    return (cuts or "whole") + (" (kept cut)" if sharding.kept else "")


def _describe_sum(operator: Operator, dim: str) -> str:
    return f"*{dim}*" if dim in operator.reduced else dim


def _format_kind(kind: object) -> str:
    return str(kind).replace("_", "-")


def _format_ticks(ticks: int) -> str:
    return format_time(to_seconds(ticks)) if ticks else "0"


def _wrap_prose(*lines: str) -> Iterator[str]:
    yield from (*wrap(" ".join(lines), 118, break_long_words=False, break_on_hyphens=False), "")


def _format_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield "| --- " * len(names) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def write_walk(walk: Walk, folder: Path) -> None:
    """Write the page and its picture."""
    (folder / PAGE).write_text(walk.format_page(), "utf-8")
    draw_sharded_graph(walk.problem.graph, walk.plan, folder / PICTURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.studies.operator_walk")
    parser.add_argument("folder", type=Path)
    write_walk(Walk(), parser.parse_args().folder)
