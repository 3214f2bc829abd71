"""How long segments take on a rank, where nothing contends: what they do, at the rates of its device and its groups."""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import (
    Pass,
    composed_time,
    operator_launches,
    operator_time,
    optimizer_time,
    weight_gradient_time,
)
from meshwise.simulator.machine.kernels import streaming_time
from meshwise.simulator.memo import memoise
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.optimizer import Parameters, count_updated_parameters, step_bytes
from meshwise.strategies.lowering.costs.segments import Checkpoints, Kernels, Segment, Streaming
from meshwise.strategies.lowering.rank_classes.machine import RankProfile
from meshwise.strategies.plan.offloading import UPDATE_CHUNKS
from meshwise.strategies.plan.plan import SharedStates
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.recomputation import HOOK_LAUNCHES

HOST_ADAM = 250e-12
"""Seconds a parameter of a fused Adam on a host whose memory bandwidth is not known.

Published timings of fused host optimizers lie about there (DeepSpeed CPUAdam); they name no processor."""


class TimedSegment(NamedTuple):
    """A segment, and its ticks on a rank where nothing contends."""

    segment: Segment
    ticks: int


class KernelTicks(NamedTuple):
    """Ticks of an operator's kernels, and those among them that make gradients of weights."""

    ticks: int
    weight_ticks: int


def chain_ticks(timed_segments: Iterable[TimedSegment]) -> int:
    """Return the ticks of segments in order, where some overlap the next one.

    >>> from meshwise.simulator.program import TaskKind
    >>> up, attention = Segment(TaskKind.FORWARD, "up"), Segment(TaskKind.FORWARD, "attention")
    >>> keys = Segment(TaskKind.CONTEXT_COMMUNICATION, "keys", overlaps_next=True)
    >>> chain_ticks([TimedSegment(up, 2), TimedSegment(keys, 5), TimedSegment(attention, 3)])
    7
    """
    total = overlapped_ticks = 0
    for segment, ticks in timed_segments:
        if segment.overlaps_next:
            overlapped_ticks = max(overlapped_ticks, ticks)
        else:
            total += max(ticks, overlapped_ticks)
            overlapped_ticks = 0
    return total


class LaunchedChain(NamedTuple):
    """Ticks of a chain of segments, of launching its kernels, and until its end if it waits for launches alone.

    With launches l_i, and e_i ticks from the start of kernel i to the end of the chain, ``latest`` is the largest
    l_1 + .. + l_i + e_i: the chain ends at max(t + ticks, h + latest) where it is reached at time t and its first
    launch begins at time h, as if it could begin at h + lead.
    """

    ticks: int = 0
    launch: int = 0
    latest: int = 0

    @property
    def lead(self) -> int:
        """Ticks of launching before the chain can run without a stop."""
        return self.latest - self.ticks

    @property
    def tail(self) -> int:
        """Ticks of launching after that."""
        return self.launch - self.lead

    def extend(self, other: "LaunchedChain") -> "LaunchedChain":
        """Return the chain with another one behind it.

        >>> LaunchedChain(ticks=2, launch=3, latest=5).extend(LaunchedChain(ticks=4, launch=1, latest=5))
        LaunchedChain(ticks=6, launch=4, latest=9)
        """
        latest = max(self.latest + other.ticks, self.launch + other.latest)
        return LaunchedChain(self.ticks + other.ticks, self.launch + other.launch, latest)


def launch_chain(timed_segments: Iterable[TimedSegment], launch: float) -> LaunchedChain:
    """Return the chain of segments whose kernels the host launches in ``launch`` seconds each.

    Segments that overlap the next one start with it; a kernel that is launched with an earlier one waits for no launch.
    """
    launch_end = elapsed = longest = latest = group_latest = 0
    launch_ticks: dict[float, int] = {}
    for segment, ticks in timed_segments:
        num_launches = segment.num_launches
        if num_launches:
            if num_launches not in launch_ticks:
                launch_ticks[num_launches] = to_ticks(launch * num_launches)
            launch_end += launch_ticks[num_launches]
            group_latest = max(group_latest, launch_end + ticks)
        longest = max(longest, ticks)
        if not segment.overlaps_next:
            latest = max(latest + longest, group_latest)
            elapsed += longest
            longest = group_latest = 0
    return LaunchedChain(elapsed + longest, launch_end, max(latest + longest, group_latest))


class RankClock:
    """The ticks of segments on one rank; those of kernels are looked up once."""

    def __init__(self, rank: RankProfile) -> None:
        self.rank, self.accelerator = rank, rank.accelerator

    def time_segments(self, segments: Iterable[Segment]) -> tuple[TimedSegment, ...]:
        """Return segments with their ticks, without optional ones that take none.

        What computes beneath a collective is slowed by it.
        """
        result, collective_ticks = [], 0
        for segment in segments:
            ticks = self.count_ticks(segment)
            if segment.overlaps_next:
                collective_ticks = max(collective_ticks, ticks)
            elif collective_ticks:
                ticks += self.count_slowed_ticks(ticks, collective_ticks)
                collective_ticks = 0
            if ticks or not self._can_be_left_out(segment):
                result.append(TimedSegment(segment, ticks))
        return tuple(result)

    def count_slowed_ticks(self, compute_ticks: int, collective_ticks: int) -> int:
        """Return the ticks by which a collective lengthens the computing that runs beside it from its start on.

        With a slowdown of s, a collective of c ticks lengthens p ticks of computing by (s - 1) / s of c, or by s - 1 of
        p where the collective takes longer than all of it.
        """
        slowdown = self.rank.slowdown
        return round((slowdown - 1) * min(compute_ticks, collective_ticks / slowdown))

    def _can_be_left_out(self, segment: Segment) -> bool:
        """Return whether a segment that takes no time on the device takes none on the host either, and is optional."""
        return segment.is_optional and not (self.rank.launch and segment.num_launches)

    def count_ticks(self, segment: Segment) -> int:
        """Return the ticks of a segment."""
        if segment.collective is not None:
            return self.rank.groups[segment.axis].ticks(segment.collective, segment.size)
        match segment.work:
            case Kernels() as kernels:
                waits = to_ticks(segment.host_waits * self.rank.launch)
                return waits + segment.portion.count_ticks(*self.time_kernels(kernels))
            case Streaming() as streaming:
                return to_ticks(time_streaming(self.accelerator, streaming))
            case Checkpoints(num_regions, num_hooks) if self.accelerator.recompute_launch:
                launches = HOOK_LAUNCHES * num_hooks * self.accelerator.launch
                return to_ticks(num_regions * self.accelerator.recompute_launch + launches)
        return 0

    @memoise
    def time_kernels(self, kernels: Kernels) -> KernelTicks:
        """Return the ticks of kernels, and those among them that make gradients of weights."""
        return time_kernels(self.accelerator, kernels)


def time_kernels(accelerator: Accelerator, kernels: Kernels) -> KernelTicks:
    """Return the ticks of kernels on an accelerator, and those among them that make gradients of weights."""
    operator, is_quantised = kernels.operator, kernels.is_quantised
    arguments = accelerator, kernels.block, operator, kernels.sizes
    gradient_bytes, is_backward = kernels.gradient_bytes, kernels.direction is Pass.BACKWARD
    if kernels.is_composed:
        seconds = composed_time(*arguments, kernels.direction)
    else:
        seconds = operator_time(
            *arguments,
            kernels.direction,
            quantised=is_quantised,
            casts_weight=kernels.casts_weight,
            scaling=kernels.scaling,
            gradient_bytes=gradient_bytes,
        )
    weight_seconds = 0.0
    if is_backward:
        weight_seconds = weight_gradient_time(*arguments, quantised=is_quantised, gradient_bytes=gradient_bytes)
        if kernels.is_frozen:
            seconds, weight_seconds = seconds - weight_seconds, 0.0
    if kernels.is_distributed:
        launches = operator_launches(operator, kernels.direction, quantised=is_quantised)
        seconds += launches * accelerator.sharded_launch
    ticks = to_ticks(seconds)
    return KernelTicks(ticks, min(to_ticks(weight_seconds), ticks))


def time_streaming(accelerator: Accelerator, streaming: Streaming) -> float:
    """Return the seconds in which kernels of a kind stream bytes through an accelerator's memory."""
    launches = streaming.num_kernels * accelerator.launch
    return streaming_time(streaming.num_bytes, accelerator.bandwidth(streaming.kind), launches)


def copy_ticks(accelerator: Accelerator, size: int) -> int:
    """Return the ticks in which so many bytes of gradients are copied into one piece: they are read and written."""
    if not size:
        return 0
    return max(to_ticks(time_streaming(accelerator, Streaming(2 * size, OperatorKind.ELEMENTWISE))), 1)


def optimizer_ticks(
    accelerator: Accelerator, training: Training, plan: SharedStates, parameters: Parameters, fraction: float = 1.0
) -> int:
    """Return the ticks of the optimizer's step, with the casts of weights that layers multiply by in fp8.

    ``fraction`` is the part of the parameters that it updates.
    """
    if training.frozen:
        return 0
    shards_each = plan.zero >= 2 and plan.shards > 1  # every parameter on its own, where others share them out
    tensors = ceil(
        fraction * (ceil(parameters.tensors / plan.shards) if plan.zero and not shards_each else parameters.tensors)
    )
    cast_bytes = (
        parameters.quantised_elements * (training.parameter_bytes + training.quantised_bytes)
        if training.quantised_bytes
        else 0
    )
    seconds = optimizer_time(accelerator, fraction * (step_bytes(training, plan, parameters) + cast_bytes), tensors)
    # Sharded parameters are distributed tensors, whose dispatch costs the host a launch of its own.
    if shards_each or plan.operator_ranks > 1:
        seconds += tensors * accelerator.sharded_launch
    return to_ticks(seconds)


def norm_ticks(
    accelerator: Accelerator, training: Training, plan: SharedStates, parameters: Parameters, num_on_host: int = 0
) -> int:
    """Return the ticks in which a rank reads its gradients once, except ``num_on_host`` elements on its host."""
    size = (
        count_updated_parameters(plan, parameters.elements, parameters.expert_elements) - num_on_host
    ) * training.gradient_bytes
    return to_ticks(optimizer_time(accelerator, size))


def host_ticks(num_updated: int) -> int:
    """Return the ticks of one chunk of the host's step where its memory is not modelled."""
    return to_ticks(num_updated * HOST_ADAM / UPDATE_CHUNKS)
