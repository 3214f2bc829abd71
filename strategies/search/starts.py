"""The layouts that an engineer tries first for a model and a machine: where searches start, and what they must beat.

References
----------
Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, section 3:
tensor parallelism inside a node, a pipeline no longer than memory requires, data parallelism for the rest. Zhao et
al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023: full and hybrid sharding.
Rajbhandari et al. 2020, "ZeRO", and 2021, "ZeRO-Infinity": states shared by data ranks, and kept by hosts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from meshwise.simulator.operator_graph import OperatorKind
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.parallelism import EXPERTS, Attention
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import find_dim_sizes, violations
from meshwise.strategies.schedules.schedule import find_rule
from meshwise.strategies.search.choices import find_family
from meshwise.strategies.search.space import Space, find_choices

MAX_PIPELINE = 16
"""Pipeline ranks at most beside expert parallelism."""
MAX_TENSOR = 8
"""Tensor-parallel ranks at most, also in racks where NVLink connects more devices."""
LONG_SEQUENCE = 16_384
"""Tokens of a sequence from which context ranks cut it."""
MIN_CONTEXT_TOKENS = 4_096
"""Tokens of a sequence on a context rank at least."""
STATES_SHARE = 0.5
"""Fraction of a device's memory that parameters, gradients and states may take: activations need the rest."""

HOST_OFFLOADING = Offloading(optimizer=(1.0,), parameters=(1.0,))

NamedLayout = tuple[str, Layout]


def engineer_layouts(problem: Problem) -> tuple[NamedLayout, ...]:
    """Return the legal layouts that an engineer tries first for ``problem``, each once, with a short name."""
    names: dict[Layout, str] = {}
    for name, layout in _list_candidates(problem):
        staged_layout = _with_stages(problem, layout)
        if staged_layout not in names and next(violations(problem, staged_layout), None) is None:
            names[staged_layout] = name
    return tuple((name, layout) for layout, name in names.items())


def known_layouts(problem: Problem, space: Space) -> tuple[Layout, ...]:
    """Return the known plans of a search: recipes, and the layouts that an engineer tries first.

    Layouts that break a rule of the problem or a limit of the space are left out, as are layouts that the space does
    not accept and schedules without a flush, which train on older weights.
    """
    layouts = _list_stated_layouts(problem, space)
    legal_layouts = (
        candidate
        for candidate in layouts
        if space.allows(candidate) and next(violations(problem, candidate), None) is None
    )
    return tuple(layout for layout in legal_layouts if _is_accepted(problem, space, layout))


def _list_stated_layouts(problem: Problem, space: Space) -> tuple[Layout, ...]:
    """Return the known plans, written as the space writes them, whether the space has them or not."""
    typed_layouts = (layout for _, layout in engineer_layouts(problem))
    stated_layouts = (
        layout for layout in (*space.starts, *typed_layouts) if not find_rule(layout.schedule).is_asynchronous
    )
    choices = find_choices(problem, space)
    return tuple(dict.fromkeys(choices.express_layout(_fill_unused(space, layout)) for layout in stated_layouts))


def known_groups(problem: Problem, space: Space) -> tuple[Group, ...]:
    """Return the groups of known plans, also where the plan itself is no member because of its states or recomputation.

    People who know the degrees and the schedule of a good plan seldom know what it must recompute to fit.
    """
    choices = find_choices(problem, space)
    groups = (
        choices.filter_group(choices.find_group(layout))
        for layout in _list_stated_layouts(problem, space)
        if choices.has_family(find_family(layout)) and choices.has_group(layout)
    )
    return tuple({group.layout: group for group in groups if group.num_members}.values())


def _is_accepted(problem: Problem, space: Space, layout: Layout) -> bool:
    return space.accepts is None or not space.accepts.list_refusals(problem, complete(problem, layout))


def _fill_unused(space: Space, layout: Layout) -> Layout:
    """Return the layout with unused fields, such as the schedule of a single stage, set to values the space allows."""
    ignores_field = {"attention": layout.context == 1, "schedule": layout.pipeline == 1}
    limits = ((name, getattr(space, name)) for name, is_ignored in ignores_field.items() if is_ignored)
    new_values = {name: limit[0] for name, limit in limits if limit is not None and getattr(layout, name) not in limit}
    return replace(layout, **new_values) if new_values else layout


def sort_known_plans(problem: Problem, space: Space) -> list[tuple[Plan, Layout]]:
    """Return the known plans with their layouts, by rising number of passes: the soonest simulated first."""
    plans = [(complete(problem, layout), layout) for layout in known_layouts(problem, space)]
    return sorted(plans, key=lambda row: count_passes(problem, row[1]))


def count_passes(problem: Problem, layout: Layout) -> int:
    """Return the number of passes of all stages in a step, to which the time of a simulation is in proportion."""
    plan = complete(problem, layout)
    return plan.num_microbatches * len(plan.stages)


def _list_candidates(problem: Problem) -> Iterator[NamedLayout]:
    """Yield candidate layouts, which may break rules: those with data parallelism alone first."""
    devices = len(problem.cluster.free_devices)
    tensors = _list_tensor_degrees(problem, devices)
    yield from _list_data_parallel(problem, devices)
    yield from _list_tensor_parallel(problem, devices, tensors)
    yield from _list_pipelines(problem, devices, tensors)
    yield from _list_long_contexts(problem, devices, tensors)
    yield from _list_expert_plans(problem, devices, tensors)
    sharded_layout = Layout(data=devices, zero=3, recompute=Recompute.FULL, offload=HOST_OFFLOADING)
    yield _name_layout("FSDP with states and parameters on the host", sharded_layout)


def _list_data_parallel(problem: Problem, devices: int) -> Iterator[NamedLayout]:
    """Yield layouts with data parallelism alone: states shared by all devices, by those of a node, or not at all.

    The ones that share everything or nothing also come with the microbatch that needs no gradient accumulation.
    """
    node = problem.cluster.first_node.devices
    rank_batch = max(1, problem.training.global_batch // devices)
    sharded_layout = Layout(data=devices, zero=3)
    yield from _list_recomputes(problem, "FSDP", sharded_layout)
    yield _name_layout(
        "FSDP without accumulation", replace(sharded_layout, microbatch=rank_batch, recompute=Recompute.FULL)
    )
    if 1 < node < devices:
        yield from _list_recomputes(problem, "HSDP, shards in the node", replace(sharded_layout, zero_shards=node))
    yield from _list_recomputes(problem, "ZeRO-1", Layout(data=devices, zero=1))
    yield _name_layout("DDP", Layout(data=devices))
    yield _name_layout("DDP without accumulation", Layout(data=devices, microbatch=rank_batch))


def _list_tensor_parallel(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[NamedLayout]:
    """Yield tensor parallelism inside a node beside ZeRO-1, and beside FSDP."""
    for tensor in tensors:
        layout = _divide_devices(devices, tensor)
        yield from _list_recomputes(problem, f"{_format_degrees(layout)} + ZeRO-1", layout)
        yield _name_sharded(layout)


def _list_pipelines(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[NamedLayout]:
    """Yield the shortest pipelines: with FSDP, and where states fit with ZeRO-1, plain and interleaved."""
    layers = num_layers(problem.graph)
    for tensor in dict.fromkeys((*tensors[:1], 1)):
        for pipeline in _list_even_degrees(layers, divisors(devices // tensor))[:2]:
            layout = _divide_devices(devices, tensor, pipeline=pipeline, zero=3)
            if layout.data > 1:
                yield from _list_recomputes(problem, f"{_format_degrees(layout)} + FSDP, 1F1B", layout)
        for pipeline in _list_pipeline_degrees(problem, devices, tensor):
            layout = _divide_devices(devices, tensor, pipeline=pipeline)
            yield from _list_recomputes(problem, f"{_format_degrees(layout)}, 1F1B", layout)
            yield from _list_interleaved(problem, layout, next(iter(_list_chunks(problem, pipeline)), 2))


def _list_long_contexts(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[NamedLayout]:
    """Yield context parallelism for long sequences, alone and beside tensor parallelism."""
    sequence = problem.graph.sequence
    if sequence < LONG_SEQUENCE:
        return
    # a ring needs one fused kernel; otherwise keys are gathered
    attention = Attention.ALL_GATHER if _keeps_scores(problem) else Attention.RING
    for tensor in dict.fromkeys((*tensors[:1], 1)):
        max_degree = sequence // MIN_CONTEXT_TOKENS
        fitting_degrees = [
            degree for degree in divisors(devices // tensor) if 1 < degree <= max_degree and sequence % degree == 0
        ]
        for context in _select_degrees(problem, tensor, fitting_degrees):
            layout = _divide_devices(devices, tensor, context=context, attention=attention)
            yield from _list_recomputes(problem, f"{_format_degrees(layout)} + ZeRO-1", layout)
            yield _name_sharded(layout)


def _list_expert_plans(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[NamedLayout]:
    """Yield expert parallelism, inside a node and over as many ranks as divide the experts, beside the other axes.

    Pipelines have their states fit with shared experts, and come with the fewest and the most chunks.
    """
    experts, layers = find_dim_sizes(problem.graph, (EXPERTS,)).get(EXPERTS, 1), num_layers(problem.graph)
    if experts == 1:
        return
    for tensor in dict.fromkeys((1, *([2] if tensors else []), *tensors[:1])):
        short_pipelines = [degree for degree in divisors(devices // tensor) if degree <= MAX_PIPELINE]
        for pipeline in (1, *_list_even_degrees(layers, short_pipelines)):
            fitting_degrees = divisors(gcd(experts, devices // (tensor * pipeline)))[1:]
            for expert in _select_degrees(problem, tensor, fitting_degrees):
                if pipeline > 1 and not _states_fit(problem, devices, tensor, pipeline, expert):
                    continue
                layout = _divide_devices(devices, tensor, pipeline=pipeline, expert=expert)
                yield from _list_recomputes(problem, f"{_format_degrees(layout)} + ZeRO-1", layout)
                if pipeline == 1:
                    yield _name_sharded(layout)
                for chunks in _list_chunks(problem, pipeline) if pipeline > 1 else ():
                    yield from _list_interleaved(problem, layout, chunks)


def _divide_devices(
    devices: int, tensor: int, *, pipeline: int = 1, context: int = 1, zero: int = 1, **decisions: Any
) -> Layout:
    """Return a layout of degrees; the devices that they leave are along the data axis."""
    return Layout(
        data=devices // (tensor * pipeline * context),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        zero=zero,
        sequence_parallel=tensor > 1,
        **decisions,
    )


def _select_degrees(problem: Problem, tensor: int, degrees: Sequence[int]) -> Iterable[int]:
    """Return the largest of rising degrees whose ranks, with the tensor ranks, are inside a node, and the largest."""
    node_degrees = [degree for degree in degrees if degree * tensor <= problem.cluster.first_node.devices]
    return dict.fromkeys((*node_degrees[-1:], *degrees[-1:]))


def _list_interleaved(problem: Problem, layout: Layout, chunks: int) -> Iterator[NamedLayout]:
    """Yield a pipeline with several chunks per rank."""
    looped_layout = replace(layout, schedule="interleaved", chunks=chunks)
    yield from _list_recomputes(problem, f"{_format_degrees(layout)}, {chunks} chunks interleaved", looped_layout)


def _name_sharded(layout: Layout) -> NamedLayout:
    """Return a layout with fully sharded states and full recompute instead of its own, with its name."""
    return _name_layout(f"{_format_degrees(layout)} + FSDP", replace(layout, zero=3, recompute=Recompute.FULL))


def _list_recomputes(problem: Problem, name: str, layout: Layout) -> Iterator[NamedLayout]:
    """Yield a layout without recomputation, with that of the attention core if it keeps scores, and with full."""
    yield _name_layout(name, layout)
    if _keeps_scores(problem):
        yield _name_layout(name, replace(layout, recompute=Recompute.SELECTIVE))
    yield _name_layout(name, replace(layout, recompute=Recompute.FULL))


def _name_layout(name: str, layout: Layout) -> NamedLayout:
    """Return a layout with its name, to which its recomputation is added."""
    kind = "no" if layout.recompute is Recompute.NONE else str(layout.recompute)
    return f"{name}, {kind} recompute", layout


_DEGREE_WORDS = {"EP": "expert", "TP": "tensor", "CP": "context", "PP": "pipeline"}


def _format_degrees(layout: Layout) -> str:
    """Return degrees above 1 in words.

    >>> _format_degrees(Layout(tensor=8, pipeline=4)), _format_degrees(Layout(expert=8))
    ('TP 8 x PP 4', 'EP 8')
    """
    degrees = {word: getattr(layout, name) for word, name in _DEGREE_WORDS.items()}
    return " x ".join(f"{word} {degree}" for word, degree in degrees.items() if degree > 1)


def _keeps_scores(problem: Problem) -> bool:
    """Return whether the model's attention keeps its scores; fused kernels do not, so recomputing them saves little."""
    return any(operator.kind is OperatorKind.SOFTMAX for block in problem.graph.blocks for operator in block.operators)


def _list_tensor_degrees(problem: Problem, devices: int) -> tuple[int, ...]:
    """Return the largest legal tensor-parallel degree inside a node, and the least one with which states fit."""
    max_degree = min(problem.cluster.first_node.devices, MAX_TENSOR)
    legal_degrees = [
        degree
        for degree in divisors(devices)
        if 1 < degree <= max_degree and _is_legal_tensor(problem, devices, degree)
    ]
    fitting_degrees = [degree for degree in legal_degrees if _states_fit(problem, devices, degree, 1)]
    return tuple(dict.fromkeys((*legal_degrees[-1:], *fitting_degrees[:1])))


def _is_legal_tensor(problem: Problem, devices: int, tensor: int) -> bool:
    layout = Layout(data=devices // tensor, tensor=tensor, sequence_parallel=True)
    return all(violation.field != "tensor" for violation in violations(problem, layout))


def _states_fit(problem: Problem, devices: int, tensor: int, pipeline: int, expert: int = 1) -> bool:
    """Return whether a device has room for its part of parameters, gradients and optimizer states under ZeRO-1."""
    training = problem.training
    state_bytes = training.optimizer_bytes * tensor * pipeline / devices
    bytes_per_parameter = training.parameter_bytes + training.gradient_bytes + state_bytes
    room = STATES_SHARE * problem.usable_memory(problem.cluster.accelerator)
    expert_parameters = sum(
        prod(parameter.shape) * block.repeat
        for block in problem.graph.blocks
        for parameter in block.parameters
        if EXPERTS in parameter.dims
    )
    parameters = problem.graph.num_parameters - expert_parameters + expert_parameters / expert
    return parameters * bytes_per_parameter / (tensor * pipeline) <= room


def _list_pipeline_degrees(problem: Problem, devices: int, tensor: int) -> tuple[int, ...]:
    """Return the degrees of the two shortest pipelines whose states fit, those with even stages if there are any."""
    layers = num_layers(problem.graph)
    degrees = [degree for degree in divisors(devices // tensor) if 1 < degree <= layers]
    fitting_degrees = [degree for degree in degrees if _states_fit(problem, devices, tensor, degree)]
    return tuple(_list_even_degrees(layers, fitting_degrees)[:2] or degrees[-1:])


def _list_even_degrees(layers: int, degrees: Sequence[int]) -> Sequence[int]:
    """Return the degrees of pipelines with even stages; all possible degrees where none has them."""
    possible_degrees = [degree for degree in degrees if 1 < degree <= layers]
    return [degree for degree in possible_degrees if layers % degree == 0] or possible_degrees


def _list_chunks(problem: Problem, pipeline: int) -> tuple[int, ...]:
    """Return the least and the largest number of chunks above 1 into which a rank's layers divide; 2 where uneven."""
    rank_layers, remainder = divmod(num_layers(problem.graph), pipeline)
    chunks = [2] if remainder else [degree for degree in divisors(rank_layers) if degree > 1]
    return tuple(dict.fromkeys((*chunks[:1], *chunks[-1:])))


def _with_stages(problem: Problem, layout: Layout) -> Layout:
    """Return the layout with balanced stages where even ones are impossible."""
    remainder = num_layers(problem.graph) % (layout.pipeline * layout.chunks)
    return replace(layout, stages="balanced") if remainder else layout
