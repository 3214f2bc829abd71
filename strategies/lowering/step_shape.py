"""What a skeleton depends on: parts of passes, what is gathered and reduced after which, and how a step ends."""

from typing import NamedTuple

from strategies.lowering.fully_sharded import Sharing
from strategies.lowering.kept import KeptShape
from strategies.lowering.offload import Update
from strategies.lowering.variant import JOINED
from strategies.mesh import TENSOR
from strategies.schedule import KINDS, MAKES_GRADIENTS, ActionKind


class PartShape(NamedTuple):
    """One part of a pass: how many phases where it is a collective of a group ``along`` an axis (0: a rank's own).

    ``together`` says that the ranks of a tensor group run a rank's own part as one, ``beside`` that it starts with the
    next part.
    """

    legs: int
    together: bool
    launched: bool
    along: str = TENSOR
    beside: bool = False


class Leaving(NamedTuple):
    """A bucket of gradients by its number: after which part it leaves of a pass of each kind, and how it is reduced.

    ``parts`` are those of a whole backward, and of the gradients of weights where they are apart. First by groups of
    a ``kind``, in ``legs`` phases, and of the last gradients then over ``replicas``, in as many; then it may be
    ``copied`` to the host.
    """

    number: int
    parts: tuple[int, ...]
    kind: str
    legs: int
    replicas: int
    copied: bool = False

    def after(self, kind: ActionKind) -> int:
        """Return the part of a pass of a kind after which it leaves."""
        return self.parts[MAKES_GRADIENTS.index(kind)]


class UnitShape(NamedTuple):
    """A unit of a pass whose parameters are gathered: the first part that reads them, its block, and its gathers.

    ``gathers`` are kinds of groups and phases of each.
    """

    first: int
    block: int
    gathers: tuple[tuple[str, int], ...]


class StageShape(NamedTuple):
    """The parts of a stage's passes; those of the last gradients may be cut more finely than the others of their kind.

    ``split`` are the parts of `SPLIT` variants, where the schedule has such. Units are those whose parameters are
    gathered for a forward, a backward and the gradients of inputs, in the order of the pass, and kept those whose
    activations go to the host; none without ZeRO 3 or offload.
    """

    forward: tuple[PartShape, ...]
    backward: tuple[PartShape, ...]
    last: tuple[PartShape, ...]
    buckets: tuple[Leaving, ...]
    split: tuple[tuple[PartShape, ...], ...] = ()
    units: tuple[tuple[UnitShape, ...], ...] = ()
    forward_kept: tuple[KeptShape, ...] = ()
    backward_kept: tuple[KeptShape, ...] = ()

    def parts(self, variant: int) -> tuple[PartShape, ...]:
        """Return the parts of one of the variants of a pass."""
        return (self.forward, self.backward, self.last, *self.split)[variant % JOINED]

    def gathered(self, kind: ActionKind) -> tuple[UnitShape, ...]:
        """Return the units that a pass of a kind reads: gradients of weights need no parameters."""
        return () if kind is ActionKind.WEIGHT else self.units[KINDS.index(kind)]


class StepShape(NamedTuple):
    """Everything a skeleton depends on.

    Parameters
    ----------
    reductions
        Per position the reductions of all gradients after the last backward: kind of groups and phases of each.
    gathers
        Per position the gathers of updated parameters, in the same form.
    replicas
        Per position the sums over replicas of what ``reductions`` left: number of the kind in `SHARED`, and phases.
    replicated
        Per position the operator axes along which gradients of ranks' own parts are summed, and phases of each.
    tied
        Pairs of positions that keep one parameter, and the phases of the sum of its gradients.
    updates
        Per position how parameters are updated.
    sharing
        What data ranks share besides the optimizer's states.
    norm
        Phases of the sum of the norm of gradients over all positions; ``None`` where it is not asked for.
    hosts_wait
        Whether hosts launch nothing of a pass before what it receives is there and all before it has ended.
    hosts_wait_inside
        Whether they launch nothing before a collective inside a pass has ended.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    stages: tuple[StageShape, ...]
    reductions: tuple[tuple[tuple[str, int], ...], ...]
    gathers: tuple[tuple[tuple[str, int], ...], ...]
    replicated: tuple[tuple[tuple[str, int], ...], ...]
    tied: tuple[tuple[int, int, int], ...]
    updates: tuple[Update, ...]
    replicas: tuple[tuple[tuple[int, int], ...], ...]
    sharing: Sharing
    norm: int | None
    hosts_wait: bool
    hosts_wait_inside: bool
