"""Measurements of one rank in a calibration of cores.

All ranks measure the same thing at the same time, so that they share memory, caches and cores as in training.
Every figure is the median of its repetitions; collectives have the mean.
"""

from collections.abc import Callable
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

from meshwise.executor.calibration.figures import (
    ATTENTIONS,
    BATCH,
    BETWEEN,
    COPY,
    GRADIENTS,
    LLAMA,
    MATMULS,
    MEASURED,
    MESSAGES,
    SEQUENCE,
    TINY,
)
from meshwise.executor.model.mixture import activation, width
from meshwise.executor.model.network import Layer, checkpointed, cross_entropy, no_contexts, norm_of, rotated, rotation
from meshwise.executor.parallel.tensor_parallel import layer_plan
from meshwise.executor.recording.private_torch import all_gather, reduce_scatter
from meshwise.executor.training.optimizer import kind_of
from meshwise.simulator.machine.accelerator import GATED_ACTIVATION, RMS_NORM, ROTARY
from meshwise.simulator.models.transformer import Transformer

REPETITIONS = (5, 100)
Run = Callable[[], Any]
Measure = Callable[[Run], float]


def measure_all(seconds: float, note: Callable[[str], None]) -> dict[str, Any]:
    """Return this rank's figures after about ``seconds``; ``note`` is called with the name of what is measured next."""
    torch.manual_seed(0)
    sizes = [size for size in (2, 4, 8) if size <= dist.get_world_size()]
    figures = 2 * (len(MATMULS) + len(GRADIENTS) + len(ATTENTIONS)) + len(KINDS) + 4 + 4 * len(sizes) * len(MESSAGES)
    measure = partial(_median_time, share=seconds / figures)
    result: dict[str, Any] = {"matmul": {}, "kinds": {}, "collectives": []}
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        note(f"matrix products in {name}")
        result["matmul"][name] = [(m, n, k, measure(_product(m, n, k, dtype))) for m, n, k in MATMULS]
    note("gradients of products")
    result["gradient"] = [_gradient_rate(m, n, k, measure) for m, n, k in GRADIENTS]
    note("attention")
    result["attention"] = [(*shape, *_attention_times(*shape, measure)) for shape in ATTENTIONS]
    note("memory")
    result["copy"] = _copy_rate(measure)
    note("dispatch")
    result["layer"] = measure(_tiny_layer())
    result["recomputed_layer"] = measure(_tiny_recomputed_layer())
    result["sharded_layer"] = measure(_tiny_sharded_layer())
    result["sharded_unit"] = measure(_tiny_sharded_unit())
    result["tiny_optimizer"] = measure(_optimizer(TINY))
    for kind, prepare in KINDS.items():
        note(kind)
        result["kinds"][kind] = measure(prepare())
    arriving = partial(_mean_time, share=seconds / figures)
    for size in sizes:
        note(f"collectives of {size} ranks")
        result["collectives"] += _collectives(size, arriving)
    return result


def _median_time(run: Run, share: float) -> float:
    """Return the median seconds of ``run``, repeated for about ``share`` seconds, equally often on every rank."""
    return median(_times(run, share))


def _mean_time(run: Run, share: float) -> float:
    """Return the mean seconds of ``run`` after some work that ranks do not end at the same moment.

    A training step reaches a collective in the same way, and pays for the wait and for waking up as well. It is the
    mean and not the median, because a step is a sum of many collectives.
    """
    a = torch.ones(BETWEEN, BETWEEN)
    return fmean(_times(run, share, before=lambda: a @ a))


def _times(run: Run, share: float, before: Run = lambda: None) -> list[float]:
    run()
    dist.barrier()
    start = perf_counter()
    run()
    least, most = REPETITIONS
    # all ranks repeat as often as rank 0: a collective needs every one of them
    count = torch.tensor(min(max(int(share / (perf_counter() - start + 1e-9)), least), most))
    dist.broadcast(count, 0)
    times = []
    for _ in range(int(count)):
        before()
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return times


def _product(m: int, n: int, k: int, dtype: torch.dtype) -> Run:
    return partial(linear, torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype))


def _gradient_rate(m: int, n: int, k: int, measure: Measure) -> float:
    """Return the FLOP/s of both gradients of a product with a bias, relative to the FLOP/s of the product."""
    layer = Linear(k, n)
    forward, backward = _each_pass(measure, layer, _random(m, k), *layer.parameters())
    return 2 * forward / backward


def _attention_times(heads: int, tokens: int, head_dim: int, measure: Measure) -> tuple[float, float]:
    """Return the seconds of fused attention in a layer, with splitting and merging of heads, forward and backward."""
    width = MEASURED.heads * head_dim
    layer = Layer(replace(MEASURED, hidden=width))
    return _each_pass(measure, layer.attention, _random(heads // MEASURED.heads, tokens, 3 * width))


def _copy_rate(measure: Measure) -> float:
    """Return the byte/s of a large copy, which reads and writes every byte."""
    source = torch.ones(COPY, dtype=torch.uint8)
    return 2 * COPY / measure(partial(torch.empty_like(source).copy_, source))


def _tiny_layer() -> Run:
    layer = Layer(TINY)
    return _both_passes(layer, _random(1, 2, TINY.hidden), *layer.parameters())


def _tiny_recomputed_layer() -> Run:
    """Return both passes of the tiny layer with attention recomputed in backward."""
    layer = Layer(TINY)
    layer.run = partial(checkpointed, no_contexts)
    return _both_passes(layer, _random(1, 2, TINY.hidden), *layer.parameters())


def _tiny_sharded_layer() -> Run:
    """Return both passes of the tiny layer with products on distributed tensors, over a mesh of this rank alone."""
    layer = Layer(TINY)
    parallelize_module(layer, _own_mesh(), layer_plan(Replicate()))
    return _both_passes(layer, _random(1, 2, TINY.hidden), *layer.parameters())


def _tiny_sharded_unit() -> Run:
    """Return both passes of the tiny layer as a unit of ``fully_shard``, over a mesh of this rank alone."""
    layer: Any = fully_shard(Layer(TINY), mesh=_own_mesh())
    source = _random(1, 2, TINY.hidden)
    gradient = torch.ones_like(source)

    def run() -> None:
        layer(source).backward(gradient)
        layer.zero_grad()

    return run


def _own_mesh() -> DeviceMesh:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return DeviceMesh.from_group(groups[dist.get_rank()], "cpu")


def _each_pass(measure: Measure, function: Callable[[Tensor], Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Return the seconds of ``function(inputs[0])`` and of its gradients; the latter at least a tenth of the former."""
    forward = measure(partial(function, inputs[0]))
    return forward, max(measure(_both_passes(function, *inputs)) - forward, forward / 10)


def _both_passes(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> Run:
    """Return a callable that runs ``function(inputs[0])`` and computes its gradients for all inputs."""
    gradient = torch.ones_like(function(inputs[0]))
    return lambda: torch.autograd.grad(function(inputs[0]), inputs, gradient)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _norm(spec: Transformer = MEASURED) -> Run:
    norm = norm_of(spec)
    return _both_passes(norm, _random(BATCH, SEQUENCE, spec.hidden), *norm.parameters())


def _elementwise() -> Run:
    x, wide = _random(BATCH, SEQUENCE, MEASURED.hidden), _random(BATCH, SEQUENCE, MEASURED.ffn)
    source = x.detach()
    add, activate = _both_passes(lambda a: a + source, x), _both_passes(gelu, wide)
    return lambda: (add(), activate(), add())


def _gated_activation() -> Run:
    wide = _random(BATCH, SEQUENCE, width(LLAMA.ffn_kind, LLAMA.ffn))
    return _both_passes(activation(LLAMA.ffn_kind), wide)


def _rotary() -> Run:
    """Return rotary embedding of queries and keys, and the copy of values that separates them from a common view."""
    query, key, value = (_random(BATCH, SEQUENCE, LLAMA.heads, 1, LLAMA.head_dim) for _ in range(3))
    gradient = torch.ones_like(query)

    def run() -> None:
        turn = rotation(torch.arange(SEQUENCE), query)
        for each in (query, key):
            torch.autograd.grad(rotated(each, turn), each, gradient)
        value.detach().clone()

    return run


def _dropout() -> Run:
    x = _random(BATCH, SEQUENCE, MEASURED.hidden)
    source = x.detach()
    return _both_passes(lambda a: source + dropout(a, 0.1), x)


def _softmax() -> Run:
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    scores = _random(BATCH, MEASURED.heads, SEQUENCE, SEQUENCE)
    return _both_passes(lambda s: torch.softmax((s / 8.0).masked_fill(future, float("-inf")), -1), scores)


def _embedding() -> Run:
    tokens = torch.randint(MEASURED.vocab, (BATCH, SEQUENCE))
    return _both_passes(lambda table: embedding(tokens, table), _random(MEASURED.vocab, MEASURED.hidden))


def _cross_entropy() -> Run:
    targets = torch.randint(MEASURED.vocab, (BATCH, SEQUENCE))
    return _both_passes(lambda logits: cross_entropy(logits, targets), _random(BATCH, SEQUENCE, MEASURED.vocab))


def _optimizer(spec: Transformer = MEASURED) -> Run:
    layer = Layer(spec)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    kind, options = kind_of("adamw")
    return kind(layer.parameters(), **options).step


KINDS: dict[str, Callable[[], Run]] = {
    "norm": _norm,
    "elementwise": _elementwise,
    "dropout": _dropout,
    "softmax": _softmax,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    GATED_ACTIVATION: _gated_activation,
    ROTARY: _rotary,
    RMS_NORM: partial(_norm, LLAMA),
    "optimizer": _optimizer,
}


def _collectives(size: int, measure: Measure) -> list[tuple[str, int, int, float]]:
    """Return (collective, ranks, bytes, seconds), measured in all groups of ``size`` neighbouring ranks at once.

    Ranks outside these groups only take part in the barriers.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # every rank creates every group, as torch requires
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks - size + 1, size)]
    member = rank // size < len(groups)
    rows = []
    for nbytes in MESSAGES:
        runs = _messages(groups[rank // size], size, nbytes) if member else {}
        for name in ("all_reduce", "all_gather", "reduce_scatter", *(["send"] if size == 2 else [])):
            seconds = measure(runs.get(name, _nothing))
            if member:
                rows.append((name, size, nbytes, seconds / 2 if name == "send" else seconds))
    return rows


def _nothing() -> None:
    return None


def _messages(group: dist.ProcessGroup, size: int, nbytes: int) -> dict[str, Run]:
    whole, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // size)
    return {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(all_gather, whole, part, group=group),
        "reduce_scatter": partial(reduce_scatter, part, whole, group=group),
        "send": partial(_ping_pong, whole, group),
    }


def _ping_pong(message: Tensor, group: dist.ProcessGroup) -> None:
    """Send ``message`` to the other of two ranks and receive it back, or receive it and send it back."""
    me = group.rank()
    peer = dist.get_global_rank(group, 1 - me)
    for sender in (0, 1):
        if me == sender:
            dist.send(message, peer)
        else:
            dist.recv(message, peer)
