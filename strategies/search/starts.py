"""The layouts that an engineer tries first for a model and a machine: where searches start, and what they must beat.

References
----------
Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, section 3:
tensor parallelism inside a node, a pipeline no longer than memory requires, data parallelism for the rest. Zhao et
al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023: full and hybrid sharding.
Rajbhandari et al. 2020, "ZeRO", and 2021, "ZeRO-Infinity": states shared by data ranks, and kept by hosts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, prod

from meshwise.simulator.operator_graph import OperatorKind
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.parallelism import EXPERTS, Attention
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations

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
        layout = Layout(data=devices // tensor, tensor=tensor, zero=1, sequence_parallel=True)
        yield from _list_recomputes(problem, f"TP {tensor} + ZeRO-1", layout)
        sharded_layout = replace(layout, zero=3, recompute=Recompute.FULL)
        yield _name_layout(f"TP {tensor} + FSDP", sharded_layout)


def _list_pipelines(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[NamedLayout]:
    """Yield the shortest pipelines: with FSDP, and where states fit with ZeRO-1, plain and interleaved."""
    layers = num_layers(problem.graph)
    for tensor in dict.fromkeys((*tensors[:1], 1)):
        for pipeline in _list_even_degrees(layers, divisors(devices // tensor))[:2]:
            degrees = _format_degrees(TP=tensor, PP=pipeline)
            layout = Layout(
                data=devices // (tensor * pipeline),
                tensor=tensor,
                pipeline=pipeline,
                zero=3,
                sequence_parallel=tensor > 1,
            )
            if layout.data > 1:
                yield from _list_recomputes(problem, f"{degrees} + FSDP, 1F1B", layout)
        for pipeline in _list_pipeline_degrees(problem, devices, tensor):
            degrees = _format_degrees(TP=tensor, PP=pipeline)
            layout = Layout(
                data=devices // (tensor * pipeline),
                tensor=tensor,
                pipeline=pipeline,
                zero=1,
                sequence_parallel=tensor > 1,
            )
            yield from _list_recomputes(problem, f"{degrees}, 1F1B", layout)
            chunks = _find_fewest_chunks(problem, pipeline)
            looped_layout = replace(layout, schedule="interleaved", chunks=chunks)
            yield from _list_recomputes(problem, f"{degrees}, {chunks} chunks interleaved", looped_layout)


def _list_long_contexts(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[NamedLayout]:
    """Yield context parallelism for long sequences, alone and beside tensor parallelism."""
    sequence = problem.graph.sequence
    if sequence < LONG_SEQUENCE:
        return
    for tensor in dict.fromkeys((*tensors[:1], 1)):
        max_degree = sequence // MIN_CONTEXT_TOKENS
        fitting_degrees = [
            degree for degree in divisors(devices // tensor) if 1 < degree <= max_degree and sequence % degree == 0
        ]
        node_degrees = [degree for degree in fitting_degrees if degree * tensor <= problem.cluster.first_node.devices]
        for context in dict.fromkeys((*node_degrees[-1:], *fitting_degrees[-1:])):
            layout = Layout(
                data=devices // (tensor * context),
                tensor=tensor,
                context=context,
                zero=1,
                sequence_parallel=tensor > 1,
                attention=_choose_attention(problem),
            )
            degrees = _format_degrees(TP=tensor, CP=context)
            yield from _list_recomputes(problem, f"{degrees} + ZeRO-1", layout)
            yield _name_layout(f"{degrees} + FSDP", replace(layout, zero=3, recompute=Recompute.FULL))


def _list_expert_plans(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[NamedLayout]:
    """Yield expert parallelism, inside a node and over as many ranks as divide the experts, beside the other axes.

    Pipelines have their states fit with shared experts, and come with the fewest and the most chunks.
    """
    experts = _find_dim_size(problem, EXPERTS)
    if experts == 1:
        return
    node = problem.cluster.first_node.devices
    for tensor in dict.fromkeys((1, *([2] if tensors else []), *tensors[:1])):
        for pipeline in (1, *_list_usual_pipelines(problem, devices // tensor)):
            data = devices // (tensor * pipeline)
            fitting_degrees = [degree for degree in divisors(gcd(experts, data)) if degree > 1]
            node_degrees = [degree for degree in fitting_degrees if degree * tensor <= node]
            for expert in dict.fromkeys((*node_degrees[-1:], *fitting_degrees[-1:])):
                if pipeline > 1 and not _states_fit(problem, devices, tensor, pipeline, expert):
                    continue
                layout = Layout(
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    expert=expert,
                    zero=1,
                    sequence_parallel=tensor > 1,
                )
                degrees = _format_degrees(EP=expert, TP=tensor, PP=pipeline)
                yield from _list_recomputes(problem, f"{degrees} + ZeRO-1", layout)
                if pipeline == 1:
                    yield _name_layout(f"{degrees} + FSDP", replace(layout, zero=3, recompute=Recompute.FULL))
                    continue
                for chunks in _list_chunks(problem, pipeline):
                    looped_layout = replace(layout, schedule="interleaved", chunks=chunks)
                    yield from _list_recomputes(problem, f"{degrees}, {chunks} chunks interleaved", looped_layout)


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


def _format_degrees(**degrees: int) -> str:
    """Return degrees above 1 in words.

    >>> _format_degrees(TP=8, PP=4), _format_degrees(EP=8, TP=1, PP=1)
    ('TP 8 x PP 4', 'EP 8')
    """
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


def _keeps_scores(problem: Problem) -> bool:
    """Return whether the model's attention keeps its scores; fused kernels do not, so recomputing them saves little."""
    return any(operator.kind is OperatorKind.SOFTMAX for block in problem.graph.blocks for operator in block.operators)


def _choose_attention(problem: Problem) -> Attention:
    """Return the attention of context ranks: a ring, which needs one fused kernel, or otherwise gathered keys."""
    return Attention.ALL_GATHER if _keeps_scores(problem) else Attention.RING


def _find_dim_size(problem: Problem, name: str) -> int:
    """Return the greatest common divisor of the sizes of a dim over all operators; 1 where none has it."""
    sizes = [
        size
        for block in problem.graph.blocks
        for operator in block.operators
        for dim, size in operator.dims
        if dim == name
    ]
    return gcd(*sizes) if sizes else 1


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
    expert_parameters = _count_expert_parameters(problem)
    parameters = problem.graph.num_parameters - expert_parameters + expert_parameters / expert
    return parameters * bytes_per_parameter / (tensor * pipeline) <= room


def _count_expert_parameters(problem: Problem) -> int:
    """Return the number of parameters of experts."""
    return sum(
        prod(parameter.shape) * block.repeat
        for block in problem.graph.blocks
        for parameter in block.parameters
        if EXPERTS in parameter.dims
    )


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


def _list_usual_pipelines(problem: Problem, devices: int) -> tuple[int, ...]:
    """Return the degrees of pipelines on ``devices`` devices with even stages; all where none has them."""
    layers = num_layers(problem.graph)
    degrees = [degree for degree in divisors(devices) if 1 < degree <= min(layers, MAX_PIPELINE)]
    return tuple([degree for degree in degrees if layers % degree == 0] or degrees)


def _list_chunks(problem: Problem, pipeline: int) -> tuple[int, ...]:
    """Return the least and the largest number of chunks above 1 into which a rank's layers divide; 2 where uneven."""
    rank_layers, remainder = divmod(num_layers(problem.graph), pipeline)
    chunks = [2] if remainder else [degree for degree in divisors(rank_layers) if degree > 1]
    return tuple(dict.fromkeys((*chunks[:1], *chunks[-1:])))


def _find_fewest_chunks(problem: Problem, pipeline: int) -> int:
    """Return the least number of chunks above 1 into which a rank's layers divide; 2 where there is none."""
    return next(iter(_list_chunks(problem, pipeline)), 2)


def _with_stages(problem: Problem, layout: Layout) -> Layout:
    """Return the layout with balanced stages where even ones are impossible."""
    remainder = num_layers(problem.graph) % (layout.pipeline * layout.chunks)
    return replace(layout, stages="balanced") if remainder else layout
