"""What a plan must keep to where it offloads to host memory."""

from collections.abc import Iterator
from typing import NamedTuple

from simulator.operator_graph import OperatorGraph
from strategies.offloading import OFFLOADS, Offloading, StepPlace
from strategies.training import Training


class Around(NamedTuple):
    """The rest of a plan, as far as offloading depends on it.

    Parameters
    ----------
    whole_backward
        Whether the schedule makes all gradients of a microbatch in one pass, and one pass at a time.
    flushes
        Whether a step ends on all ranks before the next one begins.
    ranks, shards
        Data and context ranks together, and how many of them ZeRO shares states over.
    """

    graph: OperatorGraph
    training: Training
    pipeline: int
    schedule: str
    whole_backward: bool
    flushes: bool
    ranks: int
    shards: int
    zero: int


def offload_rules(offload: Offloading, around: Around) -> Iterator[tuple[str, str]]:
    """Yield every rule that offloading breaks: the field to blame, and what holds, what was met, what would do."""
    wrong = [name for name in OFFLOADS if len(getattr(offload, name)) not in (0, 1, around.pipeline)]
    for name in wrong:
        yield (
            f"offload.{name}",
            f"{name} holds one fraction, or one for each of pipeline({around.pipeline}) ranks, met "
            f"{len(getattr(offload, name))}; nearest: {around.pipeline} of them",
        )
    if wrong:
        return
    if not around.flushes:
        yield from _unflushed_rules(offload, around.schedule)
    if any(offload.activations) and not around.whole_backward:
        yield (
            "offload.activations",
            f"activations on the host move with whole passes, one after another: {around.schedule} splits backward "
            "or runs passes in pairs; nearest: 1f1b",
        )
    if any(offload.activations) and not any(block.layer for block in around.graph.blocks):
        yield (
            "offload.activations",
            "activations on the host are those of layers, the model has none; nearest: leave it out",
        )
    if any(offload.parameters):
        yield from (("offload.parameters", message) for message in _parameter_rules(offload, around))


def _unflushed_rules(offload: Offloading, schedule: str) -> Iterator[tuple[str, str]]:
    """Yield what is offloaded besides whole optimizer states, of which the host takes every update in turn."""
    for name in ("parameters", "activations"):
        if any(getattr(offload, name)):
            yield f"offload.{name}", f"{name} on the host need a flush, {schedule} has none; nearest: leave them out"
    if any(offload.optimizer) and (offload.step is StepPlace.DEVICE or any(part < 1 for part in offload.optimizer)):
        yield (
            "offload.optimizer",
            f"without a flush the host makes whole updates, {schedule} has none; nearest: 1.0 with step: host",
        )


def _parameter_rules(offload: Offloading, around: Around) -> Iterator[str]:
    ranks = range(around.pipeline)
    partly = [(offload.at("parameters", p), offload.at("optimizer", p)) for p in ranks]
    met = next((each for each in partly if each[0] > 0 and each[1] < 1), None)
    if met is not None:
        yield (
            "parameters on the host are updated from there and need optimizer: 1.0 on the same pipeline ranks, "
            f"met optimizer: {met[1]:g} with parameters: {met[0]:g}; nearest: optimizer: 1.0"
        )
    if around.ranks > 1 and around.zero < 3:
        yield (
            f"parameters on the host need zero 3 where data * context = {around.ranks} ranks keep the same parameters, "
            f"met zero {around.zero}; nearest: 3"
        )
    if around.zero and around.shards < around.ranks:
        yield (
            "parameters on the host need all ranks to share them, for replicas sum gradients on devices at the end of "
            f"a step, met {around.ranks // around.shards} replicas; nearest: zero_shards: 0"
        )
    if around.training.quantised_bytes:
        yield "parameters on the host leave no copies on devices, and fp8 ones stay there; nearest: precision: bf16"
    whole = all(fraction == 1 for fraction, _ in partly)
    if around.graph.tied and (around.pipeline > 1 or not whole):
        yield (
            "parameters on the host need both ends of a tied one on one rank, and all of them there, "
            f"met pipeline({around.pipeline}) with {'all' if whole else 'a part'} of the parameters; "
            f"nearest: {'pipeline: 1' if whole else 'parameters: 1.0'}"
        )
