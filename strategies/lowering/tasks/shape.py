"""The shape of a plan's step: what its skeleton depends on, and no more.

A shape has the parts of passes, what is gathered and reduced after which part, and how a step ends.
"""

from typing import NamedTuple

from meshwise.strategies.lowering.tasks.activation_copies import OffloadedBlock
from meshwise.strategies.lowering.tasks.fully_sharded import Sharing
from meshwise.strategies.lowering.tasks.variants import JOINED_OFFSET
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.offloading import Update
from meshwise.strategies.schedules.schedule import KINDS, MAKES_GRADIENTS, ActionKind


class PartShape(NamedTuple):
    """The shape of one part of a pass.

    Parameters
    ----------
    num_phases
        Phases of a collective of the groups along ``axis``; 0 for a rank's own work.
    runs_as_group
        Whether the ranks of a tensor group run a rank's own work as one.
    has_launch
        Whether the host launches kernels before it.
    overlaps_next
        Whether it starts with the next part.
    """

    num_phases: int
    runs_as_group: bool
    has_launch: bool
    axis: str = TENSOR
    overlaps_next: bool = False


class LeavingBucket(NamedTuple):
    """A bucket of gradients that leaves after a part of a pass, and how it is reduced.

    Parameters
    ----------
    number
        The number of the bucket in its stage.
    parts
        The part after which it leaves in a whole backward, and in the gradients of weights where they are apart.
    kind, num_phases
        Kind of the groups that reduce it, and phases of that reduction.
    num_replica_phases
        Phases of the sum of a stage's last gradients over replicas.
    is_copied
        Whether it is then copied to the host.
    """

    number: int
    parts: tuple[int, ...]
    kind: str
    num_phases: int
    num_replica_phases: int
    is_copied: bool = False

    def leaving_part(self, kind: ActionKind) -> int:
        """Return the part of a pass of a kind after which the bucket leaves."""
        return self.parts[MAKES_GRADIENTS.index(kind)]


class UnitShape(NamedTuple):
    """A unit of a pass whose parameters are gathered: the first part that reads them, its block, and its gathers.

    ``gathers`` are kinds of groups, each with the number of its phases.
    """

    first_part: int
    block: int
    gathers: tuple[tuple[str, int], ...]


class StageShape(NamedTuple):
    """The parts of a stage's passes, its buckets and units.

    Parameters
    ----------
    forward, backward, last_backward
        Parts of the passes; those of the last gradients may be cut more finely than the others of their kind.
    split_passes
        Parts of the `SPLIT_VARIANTS`, where the schedule splits backward.
    units
        Units whose parameters are gathered for a forward, a backward and the gradients of inputs, in the order of the
        pass; none without ZeRO 3 or offload.
    forward_offloads, backward_offloads
        Blocks whose activations go to the host; none without offload.
    """

    forward: tuple[PartShape, ...]
    backward: tuple[PartShape, ...]
    last_backward: tuple[PartShape, ...]
    buckets: tuple[LeavingBucket, ...]
    split_passes: tuple[tuple[PartShape, ...], ...] = ()
    units: tuple[tuple[UnitShape, ...], ...] = ()
    forward_offloads: tuple[OffloadedBlock, ...] = ()
    backward_offloads: tuple[OffloadedBlock, ...] = ()

    def select_parts(self, variant: int) -> tuple[PartShape, ...]:
        """Return the parts of one variant of a pass."""
        return (self.forward, self.backward, self.last_backward, *self.split_passes)[variant % JOINED_OFFSET]

    def select_units(self, kind: ActionKind) -> tuple[UnitShape, ...]:
        """Return the units that a pass of a kind reads: gradients of weights need no parameters."""
        return () if kind is ActionKind.WEIGHT else self.units[KINDS.index(kind)]


class StepShape(NamedTuple):
    """Everything that a skeleton depends on.

    Parameters
    ----------
    reductions
        Per position the reductions of all gradients after the last backward: kinds of groups, with phases of each.
    gathers
        Per position the gathers of updated parameters, in the same form.
    replicated_sums
        Per position the operator axes along which gradients of replicated parameters are summed, with phases of each.
    tied_sums
        Pairs of positions that keep one parameter, with the phases of the sum of its gradients.
    updates
        Per position how parameters are updated.
    replica_sums
        Per position the sums over replicas of what ``reductions`` left: index of the kind in `SHARING_KINDS`, and
        phases.
    sharing
        What data ranks share besides the optimizer's states.
    norm_phases
        Phases of the sum of the norm of gradients over all positions; ``None`` without clipping.
    hosts_wait
        Whether hosts launch nothing of a pass before its inputs have arrived and all earlier work has ended.
    hosts_wait_inside
        Whether hosts launch nothing before a collective inside a pass has ended.
    table_moves
        Kinds of groups that move indices and rows of tables beside a microbatch, with phases of each.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    stages: tuple[StageShape, ...]
    reductions: tuple[tuple[tuple[str, int], ...], ...]
    gathers: tuple[tuple[tuple[str, int], ...], ...]
    replicated_sums: tuple[tuple[tuple[str, int], ...], ...]
    tied_sums: tuple[tuple[int, int, int], ...]
    updates: tuple[Update, ...]
    replica_sums: tuple[tuple[tuple[int, int], ...], ...]
    sharing: Sharing
    norm_phases: int | None
    hosts_wait: bool
    hosts_wait_inside: bool
    table_moves: tuple[tuple[str, int], ...] = ()
