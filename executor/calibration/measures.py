"""Measurements of one rank in a calibration of cores.

All ranks measure the same thing at the same time, so that they share memory, caches and cores as in training.
Every figure is the median of its repetitions; collectives have the mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import Linear
from torch.nn.functional import dropout, embedding, gelu, linear

from meshwise.executor.calibration.device_transfers import ELEMENT_BYTES, build_runs
from meshwise.executor.calibration.figures import (
    ATTENTIONS,
    BATCH,
    COPY_BYTES,
    GRADIENTS,
    LLAMA_MODEL,
    MATMULS,
    MEASURED_MODEL,
    MESSAGES,
    PAUSE_SIZE,
    SEQUENCE,
    TINY_MODEL,
)
from meshwise.executor.model.mixture import activation, width
from meshwise.executor.model.network import (
    Layer,
    build_norm,
    compute_rotation,
    cross_entropy,
    make_null_contexts,
    rotate_heads,
    run_checkpointed,
)
from meshwise.executor.parallel.tensor_parallel import layer_plan
from meshwise.executor.training.optimizer import find_optimizer
from meshwise.simulator.machine.accelerator import GATED_ACTIVATION, RMS_NORM, ROTARY
from meshwise.simulator.models.transformer import Transformer

REPETITIONS = (5, 100)
Run = Callable[[], Any]
Measure = Callable[[Run], float]


def measure_all(seconds: float, note: Callable[[str], None]) -> dict[str, Any]:
    """Return this rank's figures after about ``seconds``; ``note`` is called with the name of what is measured next."""
    torch.manual_seed(0)
    sizes = [size for size in (2, 4, 8) if size <= dist.get_world_size()]
    num_figures = (
        2 * (len(MATMULS) + len(GRADIENTS) + len(ATTENTIONS)) + len(KINDS) + 4 + 4 * len(sizes) * len(MESSAGES)
    )
    measure = partial(measure_median, share=seconds / num_figures)
    result: dict[str, Any] = {"matmul": {}, "kinds": {}, "collectives": []}
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        note(f"matrix products in {name}")
        result["matmul"][name] = [(m, n, k, measure(_build_product(m, n, k, dtype))) for m, n, k in MATMULS]
    note("gradients of products")
    result["gradient"] = [_measure_gradient_rate(m, n, k, measure) for m, n, k in GRADIENTS]
    note("attention")
    result["attention"] = [(*shape, *_measure_attention(*shape, measure)) for shape in ATTENTIONS]
    note("memory")
    result["copy"] = _measure_copy_rate(measure)
    note("dispatch")
    result["layer"] = measure(_build_tiny_layer())
    result["recomputed_layer"] = measure(_build_recomputed_layer())
    result["sharded_layer"] = measure(_build_sharded_layer())
    result["sharded_unit"] = measure(_build_sharded_unit())
    result["tiny_optimizer"] = measure(_prepare_optimizer(TINY_MODEL))
    for kind, prepare in KINDS.items():
        note(kind)
        result["kinds"][kind] = measure(prepare())
    measure_message = partial(measure_mean, share=seconds / num_figures)
    for size in sizes:
        note(f"collectives of {size} ranks")
        result["collectives"] += measure_collectives(size, measure_message)
    return result


def measure_median(run: Run, share: float) -> float:
    """Return the median seconds of ``run``, repeated for about ``share`` seconds, equally often on every rank."""
    return median(measure_times(run, share))


def measure_mean(run: Run, share: float, most: int = REPETITIONS[1]) -> float:
    """Return the mean seconds of ``run`` after some work that ranks do not end at the same moment.

    A training step reaches a collective in the same way, and pays for the wait and for waking up as well. It is the
    mean and not the median, because a step is a sum of many collectives.
    """
    a = torch.ones(PAUSE_SIZE, PAUSE_SIZE)
    return fmean(measure_times(run, share, interlude=lambda: a @ a, most=most))


def measure_times(
    run: Run,
    share: float,
    interlude: Run = lambda: None,
    least: int = REPETITIONS[0],
    most: int = REPETITIONS[1],
) -> list[float]:
    """Return the seconds of every run of several that take about ``share`` seconds, ``least`` to ``most`` of them."""
    run()
    dist.barrier()
    start = perf_counter()
    run()
    # all ranks repeat as often as rank 0: a collective needs every one of them
    num_runs = torch.tensor(min(max(int(share / (perf_counter() - start + 1e-9)), least), most))
    dist.broadcast(num_runs, 0)
    times = []
    for _ in range(int(num_runs)):
        interlude()
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return times


def _build_product(m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    return partial(linear, torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype))


def _measure_gradient_rate(m: int, n: int, k: int, measure: Measure) -> float:
    """Return the FLOP/s of both gradients of a product with a bias, relative to the FLOP/s of the product."""
    layer = Linear(k, n)
    forward, backward = _time_passes(measure, layer, _draw_tensor(m, k), *layer.parameters())
    return 2 * forward / backward


def _measure_attention(heads: int, tokens: int, head_dim: int, measure: Measure) -> tuple[float, float]:
    """Return the seconds of fused attention in a layer, with splitting and merging of heads, forward and backward."""
    width = MEASURED_MODEL.heads * head_dim
    layer = Layer(replace(MEASURED_MODEL, hidden=width))
    return _time_passes(measure, layer.attention, _draw_tensor(heads // MEASURED_MODEL.heads, tokens, 3 * width))


def _measure_copy_rate(measure: Measure) -> float:
    """Return the byte/s of a large copy, which reads and writes every byte."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    return 2 * COPY_BYTES / measure(partial(torch.empty_like(source).copy_, source))


def _build_tiny_layer() -> Run:
    layer = Layer(TINY_MODEL)
    return _build_passes(layer, _draw_tensor(1, 2, TINY_MODEL.hidden), *layer.parameters())


def _build_recomputed_layer() -> Run:
    """Return both passes of the tiny layer with attention recomputed in backward."""
    layer = Layer(TINY_MODEL)
    layer.run_core = partial(run_checkpointed, make_null_contexts)
    return _build_passes(layer, _draw_tensor(1, 2, TINY_MODEL.hidden), *layer.parameters())


def _build_sharded_layer() -> Run:
    """Return both passes of the tiny layer with products on distributed tensors, over a mesh of this rank alone."""
    layer = Layer(TINY_MODEL)
    parallelize_module(layer, build_own_mesh(), layer_plan(Replicate()))
    return _build_passes(layer, _draw_tensor(1, 2, TINY_MODEL.hidden), *layer.parameters())


def _build_sharded_unit() -> Run:
    """Return both passes of the tiny layer as a unit of ``fully_shard``, over a mesh of this rank alone."""
    layer: Any = fully_shard(Layer(TINY_MODEL), mesh=build_own_mesh())
    source = _draw_tensor(1, 2, TINY_MODEL.hidden)
    gradient = torch.ones_like(source)

    def run() -> None:
        layer(source).backward(gradient)
        layer.zero_grad()

    return run


def build_own_mesh(device: str = "cpu") -> DeviceMesh:
    """Return a mesh of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return DeviceMesh.from_group(groups[dist.get_rank()], device)


def _time_passes(measure: Measure, function: Callable[[Tensor], Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Return the seconds of ``function(inputs[0])`` and of its gradients; the latter at least a tenth of the former."""
    forward = measure(partial(function, inputs[0]))
    return forward, max(measure(_build_passes(function, *inputs)) - forward, forward / 10)


def _build_passes(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> Run:
    """Return a callable that runs ``function(inputs[0])`` and computes its gradients for all inputs."""
    gradient = torch.ones_like(function(inputs[0]))
    return lambda: torch.autograd.grad(function(inputs[0]), inputs, gradient)


def _draw_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _prepare_norm(spec: Transformer = MEASURED_MODEL) -> Run:
    norm = build_norm(spec)
    return _build_passes(norm, _draw_tensor(BATCH, SEQUENCE, spec.hidden), *norm.parameters())


def _prepare_elementwise() -> Run:
    x, wide_input = (_draw_tensor(BATCH, SEQUENCE, size) for size in (MEASURED_MODEL.hidden, MEASURED_MODEL.ffn))
    source = x.detach()
    add, activate = _build_passes(lambda a: a + source, x), _build_passes(gelu, wide_input)
    return lambda: (add(), activate(), add())


def _prepare_activation() -> Run:
    wide_input = _draw_tensor(BATCH, SEQUENCE, width(LLAMA_MODEL.ffn_kind, LLAMA_MODEL.ffn))
    return _build_passes(activation(LLAMA_MODEL.ffn_kind), wide_input)


def _prepare_rotary() -> Run:
    """Return rotary embedding of queries and keys, and the copy of values that separates them from a common view."""
    query, key, value = (_draw_tensor(BATCH, SEQUENCE, LLAMA_MODEL.heads, 1, LLAMA_MODEL.head_dim) for _ in range(3))
    gradient = torch.ones_like(query)

    def run() -> None:
        turn = compute_rotation(torch.arange(SEQUENCE), query)
        for tensor in (query, key):
            torch.autograd.grad(rotate_heads(tensor, turn), tensor, gradient)
        value.detach().clone()

    return run


def _prepare_dropout() -> Run:
    x = _draw_tensor(BATCH, SEQUENCE, MEASURED_MODEL.hidden)
    source = x.detach()
    return _build_passes(lambda a: source + dropout(a, 0.1), x)


def _prepare_softmax() -> Run:
    future_mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    scores = _draw_tensor(BATCH, MEASURED_MODEL.heads, SEQUENCE, SEQUENCE)
    return _build_passes(lambda s: torch.softmax((s / 8.0).masked_fill(future_mask, float("-inf")), -1), scores)


def _prepare_embedding() -> Run:
    tokens = torch.randint(MEASURED_MODEL.vocab, (BATCH, SEQUENCE))
    return _build_passes(partial(embedding, tokens), _draw_tensor(MEASURED_MODEL.vocab, MEASURED_MODEL.hidden))


def _prepare_loss() -> Run:
    targets = torch.randint(MEASURED_MODEL.vocab, (BATCH, SEQUENCE))
    logits = _draw_tensor(BATCH, SEQUENCE, MEASURED_MODEL.vocab)
    return _build_passes(partial(cross_entropy, targets=targets), logits)


def _prepare_optimizer(spec: Transformer = MEASURED_MODEL) -> Run:
    layer = Layer(spec)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    kind, options = find_optimizer("adamw")
    return kind(layer.parameters(), **options).step


KINDS: dict[str, Callable[[], Run]] = {
    "norm": _prepare_norm,
    "elementwise": _prepare_elementwise,
    "dropout": _prepare_dropout,
    "softmax": _prepare_softmax,
    "embedding": _prepare_embedding,
    "cross_entropy": _prepare_loss,
    GATED_ACTIVATION: _prepare_activation,
    ROTARY: _prepare_rotary,
    RMS_NORM: partial(_prepare_norm, LLAMA_MODEL),
    "optimizer": _prepare_optimizer,
}


def measure_collectives(
    size: int, measure: Measure, device: str = "cpu", messages: Sequence[int] = MESSAGES
) -> list[tuple[str, int, int, float]]:
    """Return (collective, ranks, bytes, seconds), measured in all groups of ``size`` neighbouring ranks at once.

    Ranks outside these groups only take part in the barriers.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # every rank creates every group, as torch requires
    first_ranks = range(0, num_ranks - size + 1, size)
    groups = [dist.new_group(list(range(first_rank, first_rank + size))) for first_rank in first_ranks]
    is_member = rank // size < len(groups)
    rows = []
    for nbytes in messages:
        runs = build_runs(groups[rank // size], size, nbytes // ELEMENT_BYTES, device) if is_member else {}
        for name in ("all_reduce", "all_gather", "reduce_scatter", *(["p2p"] if size == 2 else [])):
            seconds = measure(runs.get(name, _do_nothing))
            if is_member:
                rows.append(("send", size, nbytes, seconds / 2) if name == "p2p" else (name, size, nbytes, seconds))
    return rows


def _do_nothing() -> None:
    return None
