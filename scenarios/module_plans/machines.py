"""This machine as a `Cluster` for one user's module: the rates and launches that its own steps were measured to have.

Passes carry their own measured times, so that only what a plan adds is left to the machine: messages, what torch's
parts for several ranks take, and the optimizer on the parameters that a rank has.
"""

from dataclasses import replace
from math import ceil, prod

from meshwise.executor.calibration.cores import build_curves, build_link
from meshwise.executor.device import CPU
from meshwise.executor.module_measures.figures import ModuleFigures
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.scenarios.module_plans.graphs import list_shapes
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.strategies.plan.problem import Training

LIBRARY = "local-cpu"
"""The machine of the library that stands for cores that were not measured."""
BANDWIDTH = 1e10
"""Byte/s of a memory whose traffic is in the measured passes; the optimizer reaches a fraction of it."""
FREE = 1e6
"""Fraction of it that all other kernels reach."""
PEAK = 1e15
"""FLOP/s of products, whose times are measured."""
UNIT_MESSAGES = 3
"""Messages of a unit of ``fully_shard`` in a step: gathers for either pass, and the reduction of its gradients."""


def build_machine(
    figures: ModuleFigures,
    layout: ModuleLayout,
    training: Training,
    local_samples: int,
    num_units: int,
    memory: float,
    device: str,
    pace: float = 0.0,
) -> Cluster:
    """Return a cluster of as many devices as a layout has ranks.

    Parameters
    ----------
    local_samples
        Samples of a step on a rank.
    num_units
        Units that the simulator gathers one at a time.
    memory
        Bytes that tensors of a rank may take.
    pace
        How many times as long as on `LIBRARY` products take, of whose measured backward the gradients of weights are a
        part; with 0 they are no part of it.
    """
    shapes = list(list_shapes(figures))
    elements = sum(map(prod, shapes))
    update_bytes = elements * (training.gradient_bytes + 2 * training.optimizer_bytes + training.parameter_bytes)
    unit = figures.unit * figures.units / num_units / UNIT_MESSAGES
    bandwidth = update_bytes / max(figures.update - figures.update_launches, figures.update / 20)
    core = cluster(LIBRARY).accelerator
    peak = core.peak("fp32") / pace if pace else PEAK
    accelerator = Accelerator(
        name="this machine with this module",
        peak_flops=tuple((dtype, peak) for dtype in ("fp64", "fp32", "bf16", "fp16")),
        matmul=core.matmul,
        memory=memory,
        memory_bandwidth=BANDWIDTH,
        kernel_bandwidth=(("optimizer", bandwidth / BANDWIDTH),),
        kernel_bandwidth_default=FREE,
        reserved=figures.buffers + figures.batch * local_samples,
        unit_launch=unit if layout.data > 1 and layout.zero > 1 else 0.0,
        optimizer_launch=find_fixed_time(figures, layout, local_samples) / count_updates(layout, len(shapes)),
        computes_collectives=device == CPU,
    )
    curves = build_curves(figures.collectives)
    link = build_link(curves)
    host = Host("this machine", memory * layout.num_ranks, BANDWIDTH, layout.num_ranks)
    machine = build_homogeneous("this machine", accelerator, host, 1, layout.num_ranks, link, link)
    return replace(machine, collectives=curves)


def find_fixed_time(figures: ModuleFigures, layout: ModuleLayout, local_samples: int) -> float:
    """Return the seconds of a step besides passes, messages of states and what the optimizer takes an element."""
    reads_all = figures.read_samples == local_samples * layout.data
    reading = figures.reading if reads_all else figures.reading * local_samples / figures.read_samples
    seconds = reading + figures.loop + figures.update_launches / layout.pipeline
    seconds += figures.reduction if layout.num_ranks > 1 else 0.0
    if layout.data == 1:
        return seconds
    if not layout.zero:
        return seconds + figures.replica / layout.pipeline
    # a gather and a reduction of each unit a step, which the simulator has as one message
    units = figures.units * figures.unit * 2 / UNIT_MESSAGES if layout.zero == 1 else 0.0
    return seconds + (figures.sharded_update + units) / layout.pipeline


def count_update_bytes(
    figures: ModuleFigures, layout: ModuleLayout, training: Training, local_samples: int, fraction: float = 1.0
) -> float:
    """Return the most bytes of tensors of a rank after backward, of whose temporary ones the simulator has none.

    Parameters, gradients and states are there, with temporary tensors of the optimizer, and buckets of all gradients in
    `DistributedDataParallel`. Where operators are cut, gradients are summed before, as one tensor and its copy. Of a
    pipeline every stage is taken to have equally many.

    Parameters
    ----------
    fraction
        Of all elements of parameters those that a rank has where operators are cut.
    """
    elements = sum(map(prod, list_shapes(figures))) * fraction
    states = elements * (training.shard_bytes + training.gradient_bytes)
    temporary, buckets = 0.0, 0.0
    if not layout.offload.optimizer:  # else both are on the host
        states += figures.state * fraction
        temporary = figures.update_peak * fraction
    if layout.data > 1 and not layout.zero:
        gradients = elements * training.gradient_bytes
        if layout.operator_ranks > 1:
            temporary = max(temporary, 2 * gradients)
        else:
            buckets = gradients
    shared = (states + temporary) / layout.shards + buckets
    return shared / layout.pipeline + figures.buffers + figures.batch * local_samples


def count_updates(layout: ModuleLayout, num_tensors: int) -> int:
    """Return the parameters that the simulator counts in an update: with ZeRO 1 ranks share them out.

    Of a pipeline every stage is taken to have equally many.
    """
    num_tensors = ceil(num_tensors / layout.pipeline)
    return max(ceil(num_tensors / layout.shards) if layout.zero == 1 else num_tensors, 1)
