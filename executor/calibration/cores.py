"""Measures the cores of this machine as a Cluster: kernels and messages alone, outside of training steps."""

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from meshwise.executor.calibration.figures import (
    BATCH,
    LLAMA_MODEL,
    MEASURED_MODEL,
    SEQUENCE,
    TINY_MODEL,
    calibration_file,
)
from meshwise.executor.device import read_memory_size
from meshwise.executor.launch.launcher import launch_ranks, require_torch
from meshwise.executor.recording.rank_files import make_teller
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.machine.accelerator import GATED_ACTIVATION, RMS_NORM, ROTARY, Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.compute import Pass, operator_launches, operator_time
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.kernels import AttentionModel, AttentionShape, MatmulModel, attention_compute_time
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import Block, Operator, OperatorKind
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.recomputation import HOOK_LAUNCHES

_OPERATORS = {
    "norm": ("layers.input_norm",),
    "elementwise": ("layers.attention_residual", "layers.activation", "layers.feed_forward_residual"),
    "dropout": ("layers.attention_residual",),
    "softmax": ("layers.softmax",),
    "embedding": ("embedding.token",),
    "cross_entropy": ("head.cross_entropy",),
    GATED_ACTIVATION: ("layers.activation",),
    ROTARY: ("layers.rotary",),
    RMS_NORM: ("layers.input_norm",),
}
Row = tuple[int, int, int, float]
AttentionRow = tuple[int, int, int, float, float]
"""Heads of all sequences, tokens, head dim, seconds of forward and seconds of backward."""


def measure_cores(
    *, processes: int = 2, seconds: float = 20.0, progress: Callable[[str], None] | None = None
) -> Cluster:
    """Return this machine as a cluster of ``processes`` accelerators: cores of one thread each, measured all at once.

    `meshwise.scenarios.calibration.calibrate` then fits it to measured training steps of whole plans.

    Parameters
    ----------
    seconds
        Approximate time to measure, without the seconds to start.
    progress
        Called with the name of what is measured next.

    Raises
    ------
    ValueError
        Where ``processes`` is below 1 or ``seconds`` is not positive.
    """
    if processes < 1 or seconds <= 0:
        raise ValueError(f"processes is at least 1 and seconds positive, met {processes} and {seconds}")
    require_torch()
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        folder = Path(name)
        launch_ranks(
            "meshwise.executor.calibration.worker",
            [name, str(seconds)],
            folder,
            processes,
            poll=make_teller(folder, progress),
        )
        return _build_cluster([json.loads(calibration_file(folder, rank).read_text()) for rank in range(processes)])


def _build_cluster(ranks: Sequence[Mapping[str, Any]]) -> Cluster:
    collective_curves = build_curves(row for rank in ranks for row in rank["collectives"])
    loopback = build_link(collective_curves)
    memory = read_memory_size()
    host = Host(platform.node() or "host", memory, median(rank["copy"] for rank in ranks), os.cpu_count() or 1)
    accelerator = _build_accelerator(ranks, memory / len(ranks))
    machine = build_homogeneous("this machine", accelerator, host, 1, len(ranks), loopback, loopback)
    return replace(machine, collectives=collective_curves)


def _build_accelerator(ranks: Sequence[Mapping[str, Any]], memory: float) -> Accelerator:
    layer = _build_layer(TINY_MODEL)
    rows = {name: _merge_rows([rank["matmul"][name] for rank in ranks]) for name in ("fp32", "fp64")}
    launch_time = median(rank["layer"] for rank in ranks) / count_launches(layer.operators)
    peak = {name: find_best_rate(product_rows) for name, product_rows in rows.items()}
    bandwidth = median(rank["copy"] for rank in ranks)
    kinds = {kind: median(rank["kinds"][kind] for rank in ranks) for kind in ranks[0]["kinds"]}
    gradient = min(median(rate for rank in ranks for rate in rank["gradient"]), 2.0)
    matmul = fit_matmul(peak["fp32"], rows["fp32"]).with_gradient(gradient)
    attention_rows = [
        (*row_group[0][:3], median(row[3] for row in row_group), median(row[4] for row in row_group))
        for row_group in zip(*(rank["attention"] for rank in ranks), strict=True)
    ]
    # tensor ranks cut products
    products = [operator for operator in layer.operators if operator.kind is OperatorKind.MATMUL]
    sharded_time = median(rank["sharded_layer"] - rank["layer"] for rank in ranks) / count_launches(products)
    unit_time = median(rank["sharded_unit"] - rank["layer"] for rank in ranks) / 2  # gathered once and reduced once
    recompute_time = (
        median(rank["recomputed_layer"] - rank["layer"] for rank in ranks) - (1 + HOOK_LAUNCHES) * launch_time
    )
    optimizer_time = median(rank["tiny_optimizer"] for rank in ranks)
    return Accelerator(
        name=f"core of {platform.processor() or platform.machine() or 'cpu'}",
        peak_flops=tuple(peak.items()),
        memory=memory,
        memory_bandwidth=bandwidth,
        launch=launch_time,
        matmul=replace(matmul, sharpness=1.0),  # alone its operands are in caches; in a step it waits for them first
        attention=fit_attention(peak["fp32"] * matmul.fraction, launch_time, attention_rows),
        kernel_bandwidth=tuple(
            (kind, _compute_rate(kind, seconds, optimizer_time if kind == "optimizer" else launch_time) / bandwidth)
            for kind, seconds in kinds.items()
        ),
        sharded_launch=max(sharded_time, 0.0),
        unit_launch=max(unit_time, 0.0),
        recompute_launch=max(recompute_time, 0.0),
        optimizer_launch=optimizer_time / len(layer.parameters),
        computes_collectives=True,
    )


def count_launches(operators: Iterable[Operator]) -> int:
    """Return the number of launches that the simulator counts for forward and backward of some operators."""
    return sum(operator_launches(operator, direction) for operator in operators for direction in Pass)


def _build_layer(spec: Transformer) -> Block:
    return next(block for block in build(spec, 2, "fp32").blocks if block.layer)


def find_best_rate(rows: Sequence[Row]) -> float:
    """Return the highest FLOP/s of measured products ``(m, n, k, seconds)``.

    >>> find_best_rate([(10, 10, 10, 2.0), (10, 10, 20, 2.0)])
    2000.0
    """
    return max(2.0 * m * n * k / seconds for m, n, k, seconds in rows)


def fit_matmul(peak: float, rows: Sequence[Row]) -> MatmulModel:
    """Return the model of products, its fraction of ``peak`` and ``half_k``, of least relative error.

    ``seconds * peak / (2 m n k) = 1 / fraction + (half_k / fraction) / k`` is linear in ``1 / k``.
    """
    slowness = np.array([seconds * peak / (2.0 * m * n * k) for m, n, k, seconds in rows])
    columns = np.array([[1.0, 1.0 / k] for _, _, k, _ in rows])
    (base, slope), *_ = np.linalg.lstsq(columns / slowness[:, None], np.ones(len(rows)), rcond=None)
    if slope < 0:  # no gain from a long k: the best constant
        base, slope = float(np.sum(1 / slowness) / np.sum(1 / slowness**2)), 0.0
    fraction = min(1.0, 1.0 / float(base))
    return MatmulModel(fraction=fraction, half_k=float(slope) * fraction)


def fit_attention(rate: float, launch_time: float, rows: Sequence[AttentionRow]) -> AttentionModel:
    """Return the model of attention that fits measured causal attention.

    Fitted are its fractions of ``rate`` FLOP/s forward and backward, ``half_head``, and its launch time as a multiple
    of ``launch_time``, by least squares of the logarithms of times.
    """

    def build_model(logarithms: NDArray[np.float64]) -> AttentionModel:
        forward, backward, half_head, launches = np.exp(logarithms).tolist()
        return AttentionModel(forward=forward, backward=backward, half_head=half_head, launch=launches * launch_time)

    def compute_residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        model = build_model(logarithms)
        errors = []
        for heads, tokens, head_dim, *seconds in rows:
            shape = AttentionShape(heads, tokens, tokens, head_dim, tokens / 2, head_dim)
            for is_backward, measured_time in zip((False, True), seconds, strict=True):
                compute_time = attention_compute_time(model, rate, 0, shape, backward=is_backward)
                errors.append(math.log((launch_time + model.launch + compute_time) / measured_time))
        return np.array(errors)

    start, lower_bounds, upper_bounds = np.log(
        [[0.75, 0.75, 16.0, 4.0], [1e-4, 1e-4, 1e-3, 1e-2], [1.0, 1.0, 1e3, 1e2]]
    )
    return build_model(
        least_squares(compute_residuals, start, (lower_bounds, upper_bounds), np.ones(2 * len(rows)), outlier=0.5)[0]
    )


def _compute_rate(kind: str, seconds: float, launch_time: float) -> float:
    """Return the bandwidth in byte/s with which the simulator's time of ``kind`` is the measured time.

    Launch times are subtracted first, but at least a twentieth of the measured time remains.
    """
    if kind == "optimizer":
        training = Training(1, 1, "fp32", "adamw")
        bytes_per_parameter = training.gradient_bytes + 2 * training.optimizer_bytes + training.parameter_bytes
        return (
            _build_layer(MEASURED_MODEL).num_parameters * bytes_per_parameter / max(seconds - launch_time, seconds / 20)
        )
    names = _OPERATORS[kind]
    return count_traffic(kind) / max(seconds - 2 * len(names) * launch_time, seconds / 20)


def count_traffic(kind: str) -> float:
    """Return the bytes that the simulator counts for forward and backward of the operators measured as ``kind``."""
    attention = "unfused" if kind == "softmax" else "flash"
    model = LLAMA_MODEL if kind in (GATED_ACTIVATION, ROTARY, RMS_NORM) else MEASURED_MODEL
    spec = replace(model, attention=attention, dropout=kind == "dropout")
    unit = Accelerator("unit", (("fp32", 1e30),), memory=1.0, memory_bandwidth=1.0)  # seconds are bytes
    total = 0.0
    for block in build(spec, SEQUENCE, "fp32").blocks:
        for operator in block.operators:
            if f"{block.name}.{operator.name}" in _OPERATORS[kind]:
                sizes = dict(operator.dims) | {"batch": BATCH}
                total += sum(operator_time(unit, block, operator, sizes, direction) for direction in Pass)
    return total


def _merge_rows(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    return [(*row_group[0][:3], median(row[3] for row in row_group)) for row_group in zip(*ranks, strict=True)]


def build_curves(rows: Iterable[tuple[str, int, int, float]]) -> tuple[CollectiveCurve, ...]:
    """Return curves of measured collectives (name, ranks, bytes, seconds), with the median of equal rows.

    Times never fall with size: neighbouring points that fall by chance get their mean (isotonic regression).

    >>> curve, = build_curves([("send", 2, 1, 3.0), ("send", 2, 4, 1.0), ("send", 2, 16, 5.0)])
    >>> curve.points
    ((1.0, 2.0), (4.0, 2.0), (16.0, 5.0))
    """
    times: dict[tuple[str, int], dict[int, list[float]]] = {}
    for name, size, nbytes, seconds in rows:
        times.setdefault((name, size), {}).setdefault(nbytes, []).append(seconds)
    result = []
    for (name, size), points in times.items():
        rising_times = isotonic_regression([median(points[nbytes]) for nbytes in sorted(points)]).x.tolist()
        result.append(
            CollectiveCurve(Collective(name), size, tuple(zip(map(float, sorted(points)), rising_times, strict=True)))
        )
    return tuple(result)


def build_link(collective_curves: Sequence[CollectiveCurve]) -> Link:
    """Return the link between two devices, fitted to the curve of sends."""
    send_curve = next((curve for curve in collective_curves if curve.collective is Collective.SEND), None)
    if send_curve is None:  # one process talks to nobody
        return Link(latency=0.0, bandwidth=1e9)
    return fit_link(send_curve.points)


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """Return the link fitted to messages (bytes, seconds) of rising size: latency of the fastest, rate of the largest.

    >>> fit_link(((8.0, 1.0), (100.0, 11.0)))
    Link(latency=1.0, bandwidth=10.0, launch=0.0)
    """
    latency, (size, seconds) = min(seconds for _, seconds in points), points[-1]
    return Link(latency=latency, bandwidth=size / max(seconds - latency, seconds / 20))
