"""UniAP's strategies of layers on a mesh, and the stages and strategies that its program chooses together.

A layer is a block of the model. Along every operator axis it is data parallel (the axis cuts samples, and all ranks
keep the parameters), fully sharded (it cuts samples and the kept parameters) or tensor parallel (it cuts no samples);
its operators are cut as fast as that allows, by an exact cover of the block
(`meshwise.strategies.operators.frontier`). Where an operator cannot be cut so, as at microbatches of one sample, it has
all its choices. Redistributions are priced between blocks that follow one another; what a block reads of earlier ones
is left to the simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from math import inf
from typing import NamedTuple

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.operator_graph import BATCH
from meshwise.strategies.operators.cost_graph import IntArray, Shortfall, restrict_choices
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.stage_costs import Span, StageOperators
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.search.joint.stages import Assembly, AssemblyProblem, StageSolution, count_alive
from meshwise.strategies.stages.division import FloatArray
from meshwise.strategies.stages.joint_program import JointChoice, JointTables, solve_joint_program

DATA_PARALLEL, FULLY_SHARDED, TENSOR_PARALLEL = "data", "sharded", "tensor"
"""What an axis may do in a layer (Lin et al., CVPR 2025: DP, FSDP and TP)."""

LayerStrategy = Mapping[str, str]
"""What every operator axis does in a layer."""


def list_layer_strategies(degrees: Mapping[str, int]) -> list[LayerStrategy]:
    """Return the strategies of a layer on operator axes of these degrees.

    >>> [list(strategy.values()) for strategy in list_layer_strategies({"tensor": 2})]
    [['data'], ['sharded'], ['tensor']]
    """
    axes = [axis for axis in OPERATOR_AXES if degrees.get(axis, 1) > 1]
    uses = product((DATA_PARALLEL, FULLY_SHARDED, TENSOR_PARALLEL), repeat=len(axes))
    return [dict(zip(axes, axis_uses, strict=True)) for axis_uses in uses]


def filter_shardings(options: Sequence[OperatorSharding], strategy: LayerStrategy) -> IntArray:
    """Return the indices of the shardings of an operator that follow a strategy, as far as any can."""
    indices = list(range(len(options)))
    for axis, use in strategy.items():
        cuts_samples = use != TENSOR_PARALLEL
        indices = [n for n in indices if _cuts_samples(options[n], axis) is cuts_samples] or indices
        if cuts_samples:
            is_sharded = use == FULLY_SHARDED
            indices = [n for n in indices if _cuts_parameters(options[n], axis) is is_sharded] or indices
    return np.array(indices)


def _cuts_samples(sharding: OperatorSharding, axis: str) -> bool:
    return axis in dict(sharding.cuts).get(BATCH, ())


def _cuts_parameters(sharding: OperatorSharding, axis: str) -> bool:
    return any(axis in axes for _, cuts in sharding.kept for _, axes in cuts)


class LayerCosts(NamedTuple):
    """Ticks of a microbatch, kept bytes and transient bytes of a block, each of shape ``(strategies,)``."""

    ticks: FloatArray
    kept_bytes: FloatArray
    transient_bytes: FloatArray


class LayerStrategies:
    """The choices of operators by which every block of a plan follows each strategy."""

    def __init__(self, operators: StageOperators) -> None:
        self.operators, self.plan, self.table = operators, operators.plan, operators.table
        self.strategies = list_layer_strategies({axis: self.plan.mesh.size(axis) for axis in OPERATOR_AXES})
        self.num_layers = len(self.table.starts) - 1
        spans = [Span(layer, layer + 1, 1, Recompute.NONE) for layer in range(self.num_layers)]
        contents = [operators.describe_span(span) for span in spans]
        first_layers = {content: layer for layer, content in reversed(list(enumerate(contents)))}
        # equal blocks are solved once, for the first of them
        self.first_layers = [first_layers[content] for content in contents]
        choices = {layer: self._choose_operators(spans[layer]) for layer in set(self.first_layers)}
        self.choices = [choices[layer] for layer in self.first_layers]

    def _choose_operators(self, span: Span) -> list[tuple[int, ...]]:
        """Return the fastest choices of the operators of a block that follow each strategy."""
        graph, num_outside = self.operators.build_graph((span,))
        numbers = self.operators.list_nodes((span,))
        result = []
        for strategy in self.strategies:
            check_deadline()
            allowed_choices = {
                node: filter_shardings(self.table.choices[number], strategy)
                for node, number in enumerate(numbers, num_outside)
            }
            solution = frontier(restrict_choices(graph, allowed_choices))
            assert not isinstance(solution, Shortfall)  # without a limit
            result.append(tuple(int(indices[solution.choice[node]]) for node, indices in allowed_choices.items()))
        return result

    def build_tables(self, problem: AssemblyProblem, recompute: Recompute) -> JointTables:
        """Return the tables of UniAP's program in which all layers have one recomputation."""
        alive = count_alive(problem.plan)
        stage_keys = list(zip(problem.operators, alive, strict=True))
        stage_costs = {key: self._compute_stage_costs(*key, recompute) for key in dict.fromkeys(stage_keys)}
        costs = [stage_costs[key] for key in stage_keys]
        # what is transient counts once a stage: at least the least of the layer that needs most
        transient_bytes = [max(float(layer.transient_bytes.min()) for layer in stage) for stage in costs]
        moves = self._compute_moves()
        crossings = problem.boundaries.crossings[1 : self.num_layers]
        return JointTables(
            times=np.array([[layer.ticks for layer in stage] for stage in costs]),
            memory=np.array([[layer.kept_bytes for layer in stage] for stage in costs]),
            limits=np.array(problem.list_limits(), float) - transient_bytes,
            inner_times=moves,
            crossing_times=moves + crossings[:, None, None],
        )

    def _compute_stage_costs(self, operators: StageOperators, num_alive: int, recompute: Recompute) -> list[LayerCosts]:
        """Return the costs of every block on the devices of a stage that keeps so many microbatches."""
        spans = {layer: Span(layer, layer + 1, num_alive, recompute) for layer in set(self.first_layers)}
        costs = {layer: self._compute_layer_costs(operators, span) for layer, span in spans.items()}
        return [costs[layer] for layer in self.first_layers]

    def _compute_layer_costs(self, operators: StageOperators, span: Span) -> LayerCosts:
        """Return the costs of a block with each strategy; infinite ticks where an earlier strategy is the same."""
        graph, num_outside = operators.build_graph((span,))
        inner_edges = [edge for edge in graph.edges if edge.source >= num_outside]
        rows: list[tuple[float, int, int]] = []
        layer_choices = self.choices[span.first]
        for strategy, layer_choice in enumerate(layer_choices):
            choice = [0] * num_outside + list(layer_choice)
            own_nodes = range(num_outside, len(choice))
            ticks = sum(int(graph.times[node][choice[node]]) for node in own_nodes)
            ticks += sum(int(edge.times[choice[edge.source], choice[edge.target]]) for edge in inner_edges)
            is_repeated = layer_choice in layer_choices[:strategy]
            time = inf if is_repeated else ticks / self.plan.num_microbatches
            rows.append((time, graph.count_kept(choice), graph.find_max_transient(choice)))
        return LayerCosts(*np.array(rows, float).T)

    def _compute_moves(self) -> FloatArray:
        """Return the ticks of redistributions between blocks, of shape ``(layers - 1, strategies, strategies)``."""
        num_strategies, starts = len(self.strategies), self.table.starts
        result = np.zeros((self.num_layers - 1, num_strategies, num_strategies))
        for layer in range(self.num_layers - 1):
            sources, targets = (np.array(self.choices[number]) for number in (layer, layer + 1))
            for target in range(starts[layer + 1], starts[layer + 2]):
                for moves in self.table.redistributions_by_target[target]:
                    if starts[layer] <= moves.source < starts[layer + 1]:
                        indices = sources[:, moves.source - starts[layer]], targets[:, target - starts[layer + 1]]
                        result[layer] += moves.passes[np.ix_(*indices)]
        return result

    def build_assembly(self, choice: JointChoice, recompute: Recompute, *, is_free: bool) -> Assembly:
        """Return the stages of a choice; ``is_free`` says that more memory would not make it faster."""
        stages = []
        for first, end in zip((0, *choice.ends[:-1]), choice.ends, strict=True):
            rows = (self.choices[layer][choice.strategies[layer]] for layer in range(first, end))
            stages.append(StageSolution(choice.time, tuple(chain(*rows)), recompute, is_free))
        return Assembly(choice.ends, tuple(stages))


def assemble_jointly(problem: AssemblyProblem, seconds: float, gap: float) -> Assembly | None:
    """Return the stages and the strategies of their layers that UniAP's program finds; ``None`` where none fit.

    Memory is ignored first; only where that choice does not fit, the program is solved within the memory of every
    stage, for each recomputation of all layers. ``seconds`` and ``gap`` are those of one program.
    """
    if not problem.recompute_choices:
        return None
    layers, num_microbatches = LayerStrategies(problem.operators[0]), problem.plan.num_microbatches
    tables = layers.build_tables(problem, problem.recompute_choices[0])
    unlimited_tables = replace(tables, limits=np.full_like(tables.limits, inf))
    choice = solve_joint_program(unlimited_tables, num_microbatches, seconds=seconds, gap=gap)
    if choice is not None and tables.fits(choice.ends, choice.strategies):
        return layers.build_assembly(choice, problem.recompute_choices[0], is_free=True)
    best: tuple[JointChoice, Recompute] | None = None
    for recompute in problem.recompute_choices:
        check_deadline()
        tables = layers.build_tables(problem, recompute)
        choice = solve_joint_program(tables, num_microbatches, seconds=seconds, gap=gap)
        if choice is not None and (best is None or choice.time < best[0].time):
            best = choice, recompute
    return None if best is None else layers.build_assembly(*best, is_free=False)
