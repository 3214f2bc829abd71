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

MOST_PIPELINE = 16
"""Pipeline ranks at most beside expert parallelism."""
MOST_TENSOR = 8
"""Tensor-parallel ranks at most, also in racks where NVLink connects more devices."""
LONG_SEQUENCE = 16_384
"""Tokens of a sequence from which context ranks cut it."""
LEAST_TOKENS = 4_096
"""Tokens of a sequence on a context rank at least."""
STATES_SHARE = 0.5
"""Fraction of a device's memory that parameters, gradients and states may take: activations need the rest."""

ON_HOST = Offloading(optimizer=(1.0,), parameters=(1.0,))

Named = tuple[str, Layout]


def engineer_layouts(problem: Problem) -> tuple[Named, ...]:
    """Return the legal layouts that an engineer tries first for ``problem``, each once, with a short name."""
    found: dict[Layout, str] = {}
    for name, layout in _candidates(problem):
        whole = _with_stages(problem, layout)
        if whole not in found and next(violations(problem, whole), None) is None:
            found[whole] = name
    return tuple((name, layout) for layout, name in found.items())


def _candidates(problem: Problem) -> Iterator[Named]:
    """Yield candidate layouts, which may break rules: those with data parallelism alone first."""
    devices = len(problem.cluster.free_devices)
    tensors = _tensor_degrees(problem, devices)
    yield from _data_parallel(problem, devices)
    yield from _tensor_parallel(problem, devices, tensors)
    yield from _pipelines(problem, devices, tensors)
    yield from _long_contexts(problem, devices, tensors)
    yield from _experts(problem, devices, tensors)
    fully = Layout(data=devices, zero=3, recompute=Recompute.FULL, offload=ON_HOST)
    yield _named("FSDP with states and parameters on the host", fully)


def _data_parallel(problem: Problem, devices: int) -> Iterator[Named]:
    """Yield layouts with data parallelism alone: states shared by all devices, by those of a node, or not at all.

    The ones that share everything or nothing also come with the microbatch that needs no gradient accumulation.
    """
    node = problem.cluster.first.devices
    own = max(1, problem.training.global_batch // devices)
    fully = Layout(data=devices, zero=3)
    yield from _recomputed(problem, "FSDP", fully)
    yield _named("FSDP without accumulation", replace(fully, microbatch=own, recompute=Recompute.FULL))
    if 1 < node < devices:
        yield from _recomputed(problem, "HSDP, shards in the node", replace(fully, zero_shards=node))
    yield from _recomputed(problem, "ZeRO-1", Layout(data=devices, zero=1))
    yield _named("DDP", Layout(data=devices))
    yield _named("DDP without accumulation", Layout(data=devices, microbatch=own))


def _tensor_parallel(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[Named]:
    """Yield tensor parallelism inside a node beside ZeRO-1, and beside FSDP."""
    for tensor in tensors:
        layout = Layout(data=devices // tensor, tensor=tensor, zero=1, sequence_parallel=True)
        yield from _recomputed(problem, f"TP {tensor} + ZeRO-1", layout)
        fully = replace(layout, zero=3, recompute=Recompute.FULL)
        yield _named(f"TP {tensor} + FSDP", fully)


def _pipelines(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[Named]:
    """Yield the shortest pipelines: with FSDP, and where states fit with ZeRO-1, plain and interleaved."""
    layers = num_layers(problem.graph)
    for tensor in dict.fromkeys((*tensors[:1], 1)):
        for pipeline in _even(layers, divisors(devices // tensor))[:2]:
            degrees = _words(TP=tensor, PP=pipeline)
            layout = Layout(
                data=devices // (tensor * pipeline),
                tensor=tensor,
                pipeline=pipeline,
                zero=3,
                sequence_parallel=tensor > 1,
            )
            if layout.data > 1:
                yield from _recomputed(problem, f"{degrees} + FSDP, 1F1B", layout)
        for pipeline in _pipeline_degrees(problem, devices, tensor):
            degrees = _words(TP=tensor, PP=pipeline)
            layout = Layout(
                data=devices // (tensor * pipeline),
                tensor=tensor,
                pipeline=pipeline,
                zero=1,
                sequence_parallel=tensor > 1,
            )
            yield from _recomputed(problem, f"{degrees}, 1F1B", layout)
            chunks = _fewest_chunks(problem, pipeline)
            looped = replace(layout, schedule="interleaved", chunks=chunks)
            yield from _recomputed(problem, f"{degrees}, {chunks} chunks interleaved", looped)


def _long_contexts(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[Named]:
    """Yield context parallelism for long sequences, alone and beside tensor parallelism."""
    sequence = problem.graph.sequence
    if sequence < LONG_SEQUENCE:
        return
    for tensor in dict.fromkeys((*tensors[:1], 1)):
        most = sequence // LEAST_TOKENS
        fitting = [degree for degree in divisors(devices // tensor) if 1 < degree <= most and sequence % degree == 0]
        inside = [degree for degree in fitting if degree * tensor <= problem.cluster.first.devices]
        for context in dict.fromkeys((*inside[-1:], *fitting[-1:])):
            layout = Layout(
                data=devices // (tensor * context),
                tensor=tensor,
                context=context,
                zero=1,
                sequence_parallel=tensor > 1,
                attention=_context_attention(problem),
            )
            degrees = _words(TP=tensor, CP=context)
            yield from _recomputed(problem, f"{degrees} + ZeRO-1", layout)
            yield _named(f"{degrees} + FSDP", replace(layout, zero=3, recompute=Recompute.FULL))


def _experts(problem: Problem, devices: int, tensors: Sequence[int]) -> Iterator[Named]:
    """Yield expert parallelism, inside a node and over as many ranks as divide the experts, beside the other axes.

    Pipelines have their states fit with shared experts, and come with the fewest and the most chunks.
    """
    experts = _dim(problem, EXPERTS)
    if experts == 1:
        return
    node = problem.cluster.first.devices
    for tensor in dict.fromkeys((1, *([2] if tensors else []), *tensors[:1])):
        for pipeline in (1, *_usual_pipelines(problem, devices // tensor)):
            data = devices // (tensor * pipeline)
            fitting = [degree for degree in divisors(gcd(experts, data)) if degree > 1]
            inside = [degree for degree in fitting if degree * tensor <= node]
            for expert in dict.fromkeys((*inside[-1:], *fitting[-1:])):
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
                degrees = _words(EP=expert, TP=tensor, PP=pipeline)
                yield from _recomputed(problem, f"{degrees} + ZeRO-1", layout)
                if pipeline == 1:
                    yield _named(f"{degrees} + FSDP", replace(layout, zero=3, recompute=Recompute.FULL))
                    continue
                for chunks in _interleavings(problem, pipeline):
                    looped = replace(layout, schedule="interleaved", chunks=chunks)
                    yield from _recomputed(problem, f"{degrees}, {chunks} chunks interleaved", looped)


def _recomputed(problem: Problem, name: str, layout: Layout) -> Iterator[Named]:
    """Yield a layout without recomputation, with that of the attention core if it keeps scores, and with full."""
    yield _named(name, layout)
    if _keeps_scores(problem):
        yield _named(name, replace(layout, recompute=Recompute.SELECTIVE))
    yield _named(name, replace(layout, recompute=Recompute.FULL))


def _named(name: str, layout: Layout) -> Named:
    """Return a layout with its name, to which its recomputation is added."""
    kind = "no" if layout.recompute is Recompute.NONE else str(layout.recompute)
    return f"{name}, {kind} recompute", layout


def _words(**degrees: int) -> str:
    """Return degrees above 1 in words.

    >>> _words(TP=8, PP=4), _words(EP=8, TP=1, PP=1)
    ('TP 8 x PP 4', 'EP 8')
    """
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


def _keeps_scores(problem: Problem) -> bool:
    """Return whether the model's attention keeps its scores; fused kernels do not, so recomputing them saves little."""
    return any(each.kind is OperatorKind.SOFTMAX for block in problem.graph.blocks for each in block.operators)


def _context_attention(problem: Problem) -> Attention:
    """Return the attention of context ranks: a ring, which needs one fused kernel, or otherwise gathered keys."""
    return Attention.ALL_GATHER if _keeps_scores(problem) else Attention.RING


def _dim(problem: Problem, name: str) -> int:
    """Return the greatest common divisor of the sizes of a dim over all operators; 1 where none has it."""
    sizes = [
        size for block in problem.graph.blocks for each in block.operators for dim, size in each.dims if dim == name
    ]
    return gcd(*sizes) if sizes else 1


def _tensor_degrees(problem: Problem, devices: int) -> tuple[int, ...]:
    """Return the largest legal tensor-parallel degree inside a node, and the least one with which states fit."""
    most = min(problem.cluster.first.devices, MOST_TENSOR)
    legal = [each for each in divisors(devices) if 1 < each <= most and _cuts(problem, devices, each)]
    fitting = [each for each in legal if _states_fit(problem, devices, each, 1)]
    return tuple(dict.fromkeys((*legal[-1:], *fitting[:1])))


def _cuts(problem: Problem, devices: int, tensor: int) -> bool:
    layout = Layout(data=devices // tensor, tensor=tensor, sequence_parallel=True)
    return all(broken.field != "tensor" for broken in violations(problem, layout))


def _states_fit(problem: Problem, devices: int, tensor: int, pipeline: int, expert: int = 1) -> bool:
    """Return whether a device has room for its part of parameters, gradients and optimizer states under ZeRO-1."""
    training = problem.training
    shared = training.optimizer_bytes * tensor * pipeline / devices
    kept = training.parameter_bytes + training.gradient_bytes + shared
    room = STATES_SHARE * problem.usable(problem.cluster.accelerator)
    of_experts = _expert_parameters(problem)
    parameters = problem.graph.num_parameters - of_experts + of_experts / expert
    return parameters * kept / (tensor * pipeline) <= room


def _expert_parameters(problem: Problem) -> int:
    """Return the number of parameters of experts."""
    return sum(
        prod(parameter.shape) * block.repeat
        for block in problem.graph.blocks
        for parameter in block.parameters
        if EXPERTS in parameter.dims
    )


def _pipeline_degrees(problem: Problem, devices: int, tensor: int) -> tuple[int, ...]:
    """Return the degrees of the two shortest pipelines whose states fit, those with even stages if there are any."""
    layers = num_layers(problem.graph)
    degrees = [each for each in divisors(devices // tensor) if 1 < each <= layers]
    fitting = [each for each in degrees if _states_fit(problem, devices, tensor, each)]
    return tuple(_even(layers, fitting)[:2] or degrees[-1:])


def _even(layers: int, degrees: Sequence[int]) -> Sequence[int]:
    """Return the degrees of pipelines with even stages; all possible degrees where none has them."""
    possible = [degree for degree in degrees if 1 < degree <= layers]
    return [degree for degree in possible if layers % degree == 0] or possible


def _usual_pipelines(problem: Problem, devices: int) -> tuple[int, ...]:
    """Return the degrees of pipelines on ``devices`` devices with even stages; all where none has them."""
    layers = num_layers(problem.graph)
    degrees = [degree for degree in divisors(devices) if 1 < degree <= min(layers, MOST_PIPELINE)]
    return tuple([degree for degree in degrees if layers % degree == 0] or degrees)


def _interleavings(problem: Problem, pipeline: int) -> tuple[int, ...]:
    """Return the least and the largest number of chunks above 1 into which a rank's layers divide; 2 where uneven."""
    whole, rest = divmod(num_layers(problem.graph), pipeline)
    chunks = [2] if rest else [degree for degree in divisors(whole) if degree > 1]
    return tuple(dict.fromkeys((*chunks[:1], *chunks[-1:])))


def _fewest_chunks(problem: Problem, pipeline: int) -> int:
    """Return the least number of chunks above 1 into which a rank's layers divide; 2 where there is none."""
    return next(iter(_interleavings(problem, pipeline)), 2)


def _with_stages(problem: Problem, layout: Layout) -> Layout:
    """Return the layout with balanced stages where even ones are impossible."""
    uneven = num_layers(problem.graph) % (layout.pipeline * layout.chunks)
    return replace(layout, stages="balanced") if uneven else layout
