"""Predicts steps of a user's module under layouts, by the simulator: `StepPredictor`."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from meshwise.executor.device import CPU, read_device_memory
from meshwise.executor.module_measures.figures import CutFigures, ModuleFigures
from meshwise.executor.modules.layout import CutAxes, ModuleLayout, read_cut_words
from meshwise.scenarios.module_plans.cut_graphs import (
    count_degrees,
    count_saved,
    cut_times,
    find_state_fraction,
    share_times,
)
from meshwise.scenarios.module_plans.graphs import (
    build_block_graph,
    count_layers,
    find_pace,
    keep_more,
    list_shapes,
    mark_blocks,
    mark_cheap_operators,
    measure_operators,
)
from meshwise.scenarios.module_plans.machines import LIBRARY, build_machine, count_update_bytes
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.operator_graph import ITEMSIZE, OperatorGraph
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Resource
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import NO_OFFLOADING
from meshwise.strategies.plan.partition import partition_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

FRAMEWORK = "execute"
STATES = {2: "adamw", 1: "sgd", 0: "adafactor"}
"""The optimizer of the simulator that keeps so many states a parameter; Adafactor's are next to none."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step of a layout is predicted to take: seconds, and bytes of tensors on the fullest rank."""

    layout: ModuleLayout
    step_time: float
    peak_memory: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a step without a simulation: it takes at least ``least_time`` seconds, and these bytes."""

    layout: ModuleLayout
    least_time: float
    peak_memory: float
    fits: bool


@dataclass(frozen=True, slots=True)
class ModuleModel:
    """A module as the simulator sees it.

    Parameters
    ----------
    graph
        With measured times where there are figures.
    batch
        Samples of a step on all ranks.
    precision
        ``fp32``, ``bf16`` or ``fp64``.
    figures
        What was measured of it; ``None`` for a machine of the library.
    is_captured
        Whether the graph is the captured one.
    kept
        Bytes a sample that are needed besides what the graph keeps.
    assumptions
        What the prediction rests on, a line each.
    excess
        Bytes a sample that the graph keeps too much.
    cut_graph, cut_kept
        The captured graph and these bytes, for plans that cut its operators; ``None`` where there is none.
    pace
        How many times as long as on the machine of the library backward takes; 0 where nothing is known of it.
    has_weight
        Whether the loss is a pair (sum, weight).
    cut_plans
        How operators are cut over ranks, by the axes of these; `ModuleFigures.cuts` are of these plans.
    """

    graph: OperatorGraph
    batch: int
    precision: str
    device: str
    figures: ModuleFigures | None
    is_captured: bool
    assumptions: tuple[str, ...]
    kept: float = 0.0
    excess: float = 0.0
    cut_graph: OperatorGraph | None = None
    cut_kept: float = 0.0
    pace: float = 0.0
    has_weight: bool = False
    cut_plans: Mapping[CutAxes, Plan] = field(default_factory=dict)

    __repr__ = brief_repr("batch", "precision", "assumptions")


@dataclass(frozen=True, slots=True)
class CutProgramModel:
    """A program of cut operators as the simulator sees it: its passes without messages, and what it keeps.

    Parameters
    ----------
    samples, passes
        Seconds of both passes together with fewer and with more samples.
    message_factor
        How many times as long as alone messages take in the program.
    kept
        Bytes a sample that are needed besides what the graph keeps; below 0 where less is.
    """

    samples: tuple[int, int]
    passes: tuple[float, float]
    message_factor: float
    kept: float


class StepPredictor:
    """Predicts steps of one module; what layouts share is computed once."""

    def __init__(self, model: ModuleModel, memory: float | None = None) -> None:
        self.model = model
        self.memory = read_device_memory(model.device) if memory is None else memory
        self._costs: dict[Hashable, SimulatedCost] = {}
        self._programs: dict[Hashable, CutProgramModel] = {}

    def predict(self, layout: ModuleLayout) -> Prediction:
        """Return what a layout is predicted to take.

        Raises
        ------
        ValueError
            Where the layout breaks a rule of plans, as that the batch divides.
        """
        estimate = self.estimate(layout)
        return self.simulate(estimate)

    def build_case(self, layout: ModuleLayout) -> tuple[Problem, Plan]:
        """Return the problem and the plan that the simulator is given for a layout."""
        problem = self._find_cost(layout).problem
        return problem, self._complete(problem, layout)

    def estimate(self, layout: ModuleLayout) -> Estimate:
        """Return the memory of a layout, and a lower bound of its step time, without a simulation."""
        require_predicted_offload(layout)
        cost, local_samples = self._find_cost(layout), self.model.batch // layout.data
        plan = self._complete(cost.problem, layout)
        figures, problem = self.model.figures, cost.problem
        if figures is None:
            between_passes = 0.0
        else:
            fraction = self._find_state_fraction(layout)
            between_passes = count_update_bytes(figures, layout, problem.training, local_samples, fraction)
        peak = max(cost.peak_memory(plan) - self._count_excess(layout), between_passes)
        fits = cost.fits(plan) and between_passes <= problem.usable_memory(problem.cluster.accelerator)
        return Estimate(layout, cost.plan_bound(plan), peak, fits)

    def _count_excess(self, layout: ModuleLayout) -> float:
        """Return the bytes that measured passes of cut operators need less than simulated ones, in their order."""
        program = self._find_program(layout)
        if program is None and layout.operator_ranks == 1 and layout.pipeline == 1 and self.model.excess:
            return self._count_block_excess(layout)
        if program is None or layout.pipeline > 1 or layout.recomputes:
            return 0.0
        return max(-program.kept, 0.0) * (self.model.batch // layout.data // layout.num_microbatches)

    def _count_block_excess(self, layout: ModuleLayout) -> float:
        """Return the bytes that blocks keep less than simulated ones: those that keep nothing have none of them."""
        excess = self.model.excess * (self.model.batch // layout.data // layout.num_microbatches)
        plain = replace(layout, recompute=Recompute.NONE, offload=NO_OFFLOADING)
        if layout == plain or not count_layers(self.model.graph):
            return excess
        most, least = self.predict_passes(plain), self.predict_passes(replace(plain, recompute=Recompute.FULL))
        own = self.predict_passes(replace(layout, offload=replace(layout.offload, optimizer=())))
        return excess * min(max((own - least) / (most - least), 0.0), 1.0) if most > least else 0.0

    def simulate(self, estimate: Estimate) -> Prediction:
        """Return the prediction of a layout whose memory is known."""
        cost = self._find_cost(estimate.layout)
        seconds = cost.step_time(self._complete(cost.problem, estimate.layout))
        return Prediction(estimate.layout, seconds, estimate.peak_memory, estimate.fits)

    def predict_passes(self, layout: ModuleLayout) -> float:
        """Return the peak in bytes without temporary tensors of the optimizer."""
        cost = self._find_cost(layout)
        return cost.peak_memory(self._complete(cost.problem, layout))

    def _find_state_fraction(self, layout: ModuleLayout) -> float:
        """Return the fraction of the elements of all parameters that a rank has where operators are cut."""
        if layout.plan is None or self.model.cut_graph is None:
            return 1.0
        return find_state_fraction(self.model.cut_graph, layout.plan)

    def _complete(self, problem: Problem, layout: ModuleLayout) -> Plan:
        microbatch = max(self.model.batch // layout.data // layout.num_microbatches, 1)
        if layout.operator_ranks > 1:
            return self._complete_cuts(problem, layout, microbatch)
        choices = {layout.find_recompute(place).layer for place in range(layout.num_stages)}
        if Recompute.SELECTIVE in choices and not self.model.is_captured:
            rule = "selective recompute is predicted of captured operators"
            raise ValueError(f"{rule}, met blocks that were measured whole")
        return complete(
            problem,
            Layout(
                data=layout.data,
                microbatch=microbatch,
                zero=layout.zero,
                zero_shards=layout.zero_shards,
                reshard_after_forward=layout.reshard_after_forward,
                recompute=layout.recompute,
                offload=layout.offload,
                pipeline=layout.pipeline,
                schedule=layout.schedule,
                chunks=layout.chunks,
                stages=self._find_stages(layout),
            ),
        )

    def _complete_cuts(self, problem: Problem, layout: ModuleLayout, microbatch: int) -> Plan:
        """Return the plan of a layout that cuts operators."""
        assert layout.plan is not None  # its graph has been asked for
        num_stages, stages = layout.pipeline * layout.chunks, layout.plan.stages
        if len(stages) != num_stages:
            stages = partition_layers(problem.graph, num_stages, self._find_stages(layout))
        plan = build_operator_plan(
            problem,
            count_degrees(layout.plan),
            microbatch,
            layout.plan.shardings,
            data=layout.data,
            stages=stages,
            schedule=layout.schedule,
            chunks=layout.chunks,
        )
        return replace(
            plan,
            zero=layout.zero,
            reshard_after_forward=layout.reshard_after_forward or layout.zero < 3,
            recompute=layout.recompute,
            overlap_gradients=False,  # they are summed once, after backward
        )

    def _find_stages(self, layout: ModuleLayout) -> str | tuple[int, ...]:
        """Return the number of layers of every stage; ``balanced`` where the layout leaves cuts open."""
        if layout.pipeline == 1:
            return "even"
        if not layout.cuts or self.model.figures is None:
            return "balanced"
        paths = [block.path for block in self.model.figures.blocks]
        for path in layout.cuts:
            if path not in paths:
                raise ValueError(f"stages are predicted that begin at blocks of the module, met {path}")
        places = [0, *map(paths.index, layout.cuts), len(paths)]
        return tuple(end - start for start, end in pairwise(places))

    def count_stage_blocks(self, layout: ModuleLayout) -> int:
        """Return the blocks of the largest stage of a layout."""
        stages = self._find_stages(layout)
        num_blocks = count_layers(self.model.graph)
        return -(-num_blocks // layout.num_stages) if isinstance(stages, str) else max(stages)

    def _find_cost(self, layout: ModuleLayout) -> SimulatedCost:
        key: Hashable = layout.data, layout.pipeline, layout.zero, layout.shards
        if layout.plan is not None:
            key = key, layout.cut_axes, layout.num_microbatches, layout.plan.shardings
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = SimulatedCost(self._build_problem(layout))
        return cost

    def _build_problem(self, layout: ModuleLayout) -> Problem:
        model = self.model
        figures = model.figures
        training = build_training(model, layout)
        kept_graph = self._build_cut_graph(layout) if layout.operator_ranks > 1 else self._build_whole_graph(layout)
        graph = with_dtype(kept_graph, training.dtype)
        rank_memory = self.memory / layout.num_ranks if model.device == CPU else self.memory
        machine: Cluster
        if figures is None:
            machine = cluster(LIBRARY).with_size(1, layout.num_ranks)
        else:
            if layout.num_ranks == 1:
                graph = at_pace(graph, figures.alone / figures.passes[1])
            program = self._find_program(layout)
            if program is not None:
                figures = scale_messages(figures, program.message_factor)
            local_samples = model.batch // layout.data
            num_units = count_units(graph, layout.zero)
            machine = build_machine(
                figures, layout, training, local_samples, num_units, rank_memory, model.device, model.pace
            )
        return Problem(graph, machine, training)

    def _build_whole_graph(self, layout: ModuleLayout) -> OperatorGraph:
        return keep_more(self.model.graph, self.model.kept, at_end=layout.pipeline > 1)

    def _build_cut_graph(self, layout: ModuleLayout) -> OperatorGraph:
        """Return the graph of a layout whose operators take and keep what a rank's parts do."""
        model = self.model
        if model.cut_graph is None or layout.plan is None:
            raise ValueError(
                f"tensor({layout.operator_ranks}): a captured module and shardings are predicted, met none"
            )
        samples = max(model.batch // layout.data // layout.num_microbatches, 1)
        graph = cut_times(model.cut_graph, layout.plan, samples, cluster(LIBRARY).accelerator)
        program = self._find_program(layout)
        if program is None:
            saved = count_saved(graph, None)
            kept = model.cut_kept * (count_saved(graph, layout.plan) / saved if saved else 1.0)
        else:
            graph, kept = share_times(graph, program.passes, program.samples), max(program.kept, 0.0)
        return keep_more(graph, kept, at_end=layout.pipeline > 1)

    def _find_program(self, layout: ModuleLayout) -> "CutProgramModel | None":
        """Return what the measured program of a layout's cut operators takes; ``None`` where none was measured."""
        figures, plan = self.model.figures, layout.plan
        if figures is None or plan is None:
            return None
        cut = next((cut for cut in figures.cuts if cut.axes == layout.cut_axes), None)
        if cut is None:
            return None
        key = cut.axes, plan.shardings
        if key not in self._programs:
            self._programs[key] = model_program(self.model, figures, cut, plan)
        return self._programs[key]

    def find_messages(self, layout: ModuleLayout) -> float:
        """Return the seconds of a step in which a rank waits for messages between parts of operators."""
        cost = self._find_cost(layout)
        return cost.resource_times(self._complete(cost.problem, layout))[Resource.TENSOR]


def require_predicted_offload(layout: ModuleLayout) -> None:
    """Raise ``ValueError`` where the memory of a layout that keeps something on the host is not known."""
    if layout.offload and layout.operator_ranks > 1:
        raise ValueError(f"offload is predicted of whole operators, met tensor {layout.operator_ranks}")
    if layout.offload.optimizer and layout.zero and layout.data > 1:
        raise ValueError(
            f"offload of optimizer states is predicted without ZeRO, whose shards go to the host too, met {layout.zero}"
        )


def model_program(model: ModuleModel, figures: ModuleFigures, cut: CutFigures, plan: Plan) -> CutProgramModel:
    """Return what a measured program takes besides what the simulator adds: its messages, and what it keeps."""
    layout = ModuleLayout(plan=plan, **read_cut_words(cut.axes))
    plain = replace(model, cut_kept=0.0, figures=replace(figures, cuts=()))
    fewer, more = (StepPredictor(replace(plain, batch=samples)) for samples in cut.samples)
    alone = fewer.find_messages(layout), more.find_messages(layout)
    factor = cut.messages[1] / alone[1] if alone[1] else 1.0
    # with fewer samples messages may take another factor, which passes then make up for
    passes = tuple(max(time - factor * part, time / 20) for time, part in zip(cut.passes, alone, strict=True))
    samples = cut.samples[1]
    fraction = more._find_state_fraction(layout)
    measured = count_passes_bytes(model, figures, samples, cut.peak, fraction)
    kept = (measured - more.predict_passes(layout)) / samples
    return CutProgramModel(cut.samples, (passes[0], passes[1]), factor, kept)


def scale_messages(figures: ModuleFigures, factor: float) -> ModuleFigures:
    """Return figures whose messages take ``factor`` times as long."""
    rows = ((name, ranks, size, seconds * factor) for name, ranks, size, seconds in figures.collectives)
    return replace(figures, collectives=tuple(rows))


def count_passes_bytes(
    model: ModuleModel, figures: ModuleFigures, samples: int, peak: float, fraction: float = 1.0
) -> float:
    """Return the bytes of passes in which tensors of so many bytes are made, with what was there before.

    Parameters
    ----------
    fraction
        Of all elements of parameters those that a rank has.
    """
    elements = sum(prod(shape) for shape in list_shapes(figures)) * fraction
    itemsize = ITEMSIZE["fp64" if model.precision == "fp64" else "fp32"]
    return elements * itemsize + figures.state * fraction + figures.buffers + figures.batch * samples + peak


def count_units(graph: OperatorGraph, zero: int) -> int:
    """Return the units that the simulator counts: with ZeRO 3 blocks that have parameters, else all blocks."""
    return sum(bool(block.parameters) for _, block in graph.occurrences) if zero == 3 else len(graph.occurrences)


def build_training(model: ModuleModel, layout: ModuleLayout) -> Training:
    """Return a step of a module: weights are in bf16 where shards of them are gathered in it, else in fp32."""
    is_narrow = model.precision == "bf16" and layout.data > 1 and layout.zero > 0
    precision = "fp32" if model.precision == "bf16" and not is_narrow else model.precision
    return Training(
        model.batch,
        model.graph.sequence,
        precision,
        count_states(model.figures, precision),
        gradient_precision="fp32" if is_narrow else None,
        framework=FRAMEWORK,
    )


def count_states(figures: ModuleFigures | None, precision: str = "fp32") -> str:
    """Return the optimizer of the simulator that keeps as much as was measured; AdamW where nothing was."""
    if figures is None:
        return STATES[2]
    elements = sum(prod(shape) for shape in list_shapes(figures))
    size = 8 if precision == "fp64" else 4
    return STATES[min(round(figures.state / max(size * elements, 1)), 2)]


def with_dtype(graph: OperatorGraph, dtype: str) -> OperatorGraph:
    """Return a graph whose parameters are of a dtype."""
    blocks = []
    for block in graph.blocks:
        names = {tensor.name for tensor in block.parameters}
        tensors = (
            replace(tensor, dtype=dtype) if tensor.name in names and tensor.has_gradient else tensor
            for tensor in block.tensors
        )
        blocks.append(replace(block, tensors=tuple(tensors)))
    return replace(graph, blocks=tuple(blocks))


def at_pace(graph: OperatorGraph, factor: float) -> OperatorGraph:
    """Return a graph whose operators take ``factor`` times as long as they were measured."""
    blocks = []
    for block in graph.blocks:
        operators = []
        for operator in block.operators:
            measured = operator.measured
            if measured is not None:
                forward, backward = (
                    (line[0] * factor, line[1] * factor) for line in (measured.forward, measured.backward)
                )
                operator = replace(operator, measured=replace(measured, forward=forward, backward=backward))
            operators.append(operator)
        blocks.append(replace(block, operators=tuple(operators)))
    return replace(graph, blocks=tuple(blocks))


def build_model(
    figures: ModuleFigures | None,
    captured: OperatorGraph | None,
    batch: int,
    precision: str,
    device: str,
    why_not: str = "",
) -> ModuleModel:
    """Return a module as the simulator sees it.

    A captured graph is taken where its layers are the blocks of the module; else one of measured blocks.

    Parameters
    ----------
    why_not
        Why the module was not captured, where it was not.

    Raises
    ------
    ValueError
        Where there is neither a captured graph nor figures.
    """
    dtype = "fp64" if precision == "fp64" else "fp32"
    if captured is not None and figures is not None:
        marked = mark_blocks(captured, [block.path for block in figures.blocks])
        captured = marked if count_layers(marked) == len(figures.blocks) else captured
    captured = captured and mark_cheap_operators(captured)
    if figures is None:
        if captured is None:
            raise ValueError(f"a prediction without a calibration needs a captured module: {why_not}")
        assumptions = (
            "passes: the captured operators by the cost model",
            f"machine: {LIBRARY} of the library, which is not this one; without --no-calibrate it is measured",
        )
        return ModuleModel(captured, batch, precision, device, None, True, assumptions, cut_graph=captured)
    is_captured = captured is not None and (not figures.blocks or count_layers(captured) == len(figures.blocks))
    core = cluster(LIBRARY).accelerator
    cut_graph = None if captured is None else measure_operators(captured, figures, core)
    if cut_graph is not None and is_captured:
        graph = cut_graph
        source = "passes: the captured operators, which together take what the module was measured to"
    else:
        graph = build_block_graph(figures, dtype, "module")
        reason = why_not or f"its layers are not the {len(figures.blocks)} blocks that are recomputed and gathered"
        source = f"passes: measured block by block, as the module's graph could not serve ({reason})"
    model = ModuleModel(graph, batch, precision, device, figures, is_captured, (source,), cut_graph=cut_graph)
    kept = find_kept(model, figures)
    model = replace(model, kept=max(kept, 0.0), excess=max(-kept, 0.0))
    if captured is None or cut_graph is None:
        return model
    cut_kept = kept if is_captured else find_kept(replace(model, graph=cut_graph, kept=0.0), figures)
    cut_kept = max(cut_kept, 0.0)
    return replace(model, cut_kept=cut_kept, pace=find_pace(captured, figures, core) if is_captured else 0.0)


def find_kept(model: ModuleModel, figures: ModuleFigures) -> float:
    """Return the bytes a sample that make the peak of passes in one process the measured one; below 0 for fewer."""
    samples = figures.samples[1]
    single = replace(model, batch=samples)
    measured = count_passes_bytes(model, figures, samples, figures.peak)
    predicted = StepPredictor(single).predict_passes(ModuleLayout())
    return (measured - predicted) / samples


def find_fastest(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return predictions from the fastest that fits on; of equally fast ones the first comes first."""
    return sorted(predictions, key=lambda prediction: (not prediction.fits, prediction.step_time))
