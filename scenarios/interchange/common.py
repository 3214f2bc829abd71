"""What the field maps of several targets have in common."""

from scenarios.interchange.entry import Always, Elsewhere, Entry, Reason, Unsayable, always
from scenarios.interchange.facts import MODEL, Facts, plainly
from strategies.mesh import AXES
from strategies.offloading import Offloading

ONE_FORWARD_ONE_BACKWARD = "1f1b"
"""What a pipeline of one rank does: a forward and a backward pass a microbatch."""

HOST_STATES = Offloading(optimizer=(1.0,))
HOST_OPTIMIZER_AND_PARAMETERS = Offloading(optimizer=(1.0,), parameters=(1.0,))
"""What ``torch.distributed.fsdp.CPUOffloadPolicy`` keeps on the host: parameters, gradients and states."""

PLAIN: tuple[Entry, ...] = (
    *always("its rank order is fixed", order=AXES, placement=()),
    *always("its collectives are decentralised", gradient_reduction="all_reduce"),
    *always("its tensor parallelism has one axis", tensor_rows=1),
    Always("training.frozen", False, "adapters are not in the field map"),
    Always("training.composes_norms", False, "which kernels norms have is not in the field map"),
    Always("training.gathers_logits", False, "how the loss is computed is not in the field map"),
    Elsewhere(("training.framework", "model.name", "training.expandable_segments")),
)
"""What no target's file can say otherwise: the framework is how a step is simulated, the name what it is called, and
how torch allocates stands in the environment."""

ONE_STAGE = Elsewhere(("plan.stages",))
"""The stage of a pipeline of one rank has all layers."""

MODEL_ELSEWHERE = Elsewhere(tuple(name for name in MODEL if name != "model.name"))
"""The model is the user's, in the script."""


def one_size(facts: Facts) -> int:
    """Return the sequences of a microbatch; `Unsayable` where ranks differ."""
    value = facts["plan.microbatch"]
    if type(value) is not int:
        raise Unsayable(Reason("plan.microbatch", "the same size on all data ranks", plainly(value)))
    return value


def accumulation(facts: Facts) -> int:
    """Return the microbatches of a step."""
    return int(facts["training.global_batch"] // (facts["plan.data"] * one_size(facts)))


def no_pipeline(why: str) -> tuple[Always, ...]:
    """Return what a target without pipeline parallelism says of pipelines."""
    return always(why, pipeline=1, schedule=ONE_FORWARD_ONE_BACKWARD, chunks=1, scatter_gather=False)
