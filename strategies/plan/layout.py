"""The plan as a user writes it, and why one is illegal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwise.simulator.brief import brief
from meshwise.strategies.plan.mesh import AXES, Microbatch
from meshwise.strategies.plan.offloading import NOTHING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recomputation, Recompute

ZERO_STAGES = (0, 1, 2, 3)
"""What ZeRO shares over data ranks: nothing, the optimizer's states, gradients too, parameters too."""

GRADIENT_REDUCTIONS = ("all_reduce", "parameter_server")
"""How gradients are summed over the data axis: decentralised, or by a central server."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan as a user writes it: degrees and choices; `complete` makes a `Plan` of it.

    Parameters
    ----------
    microbatch
        Sequences of a microbatch on every data rank, or a size for each of them: data rank ``i`` runs
        microbatches of ``microbatch[i]`` sequences, and all run as many microbatches.
    stages
        ``"even"``, ``"balanced"`` or the number of layers of every stage.
    tensor_rows
        Rows of a grid of tensor-parallel ranks, of which ``tensor`` is the columns
        (`meshwise.strategies.plan.parallelism`).
    context
        Ranks that share the tokens of each sequence.
    attention
        How they compute attention.
    expert
        Ranks, of those along ``data``, that share the experts.
    schedule
        The name of a schedule, or its text form: then ``chunks`` may be left at 1 for what the text says.
    order
        Axes of the mesh from the outermost to the innermost: neighbours along the last one are
        neighbours on the machine. Those of one rank may be left out, and ``replica``, which then lies
        just outside ``data``.
    placement
        The device of every rank, in order of rank; empty for rank ``i`` on the ``i``-th free device. Devices that are
        not named stay idle.
    offload
        What is kept in host memory.
    zero_shards
        Neighbouring data ranks that ZeRO shares states over, with their context ranks; 0 for all of them.
    reshard_after_forward
        Whether ZeRO 3 gives gathered parameters up after forward and gathers them again for backward.
    gradient_reduction
        How gradients are summed over the data axis: one of `GRADIENT_REDUCTIONS`.
    overlap_tensor
        Whether the gathers and scatters of sequence parallelism run beside the products that need or make what they
        move, chunk by chunk (`meshwise.strategies.lowering.costs.rewrites`).
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatch: Microbatch = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: Recomputation = Recompute.NONE
    context: int = 1
    expert: int = 1
    attention: Attention = Attention.RING
    overlap_gradients: bool = True
    scatter_gather: bool = False
    stages: str | tuple[int, ...] = "even"
    order: tuple[str, ...] = AXES
    placement: tuple[int, ...] = ()
    offload: Offloading = NOTHING
    zero_shards: int = 0
    reshard_after_forward: bool = True
    gradient_reduction: str = "all_reduce"
    tensor_rows: int = 1
    overlap_tensor: bool = False

    __repr__ = brief()

    @property
    def replica(self) -> int:
        """Groups of data ranks that share states."""
        return self.data // (self.zero_shards or self.data)

    @property
    def sequences(self) -> int:
        """Sequences of one microbatch over all data ranks."""
        return self.data * self.microbatch if isinstance(self.microbatch, int) else sum(self.microbatch)

    @property
    def all_sequences(self) -> str:
        """The sequences of one microbatch over all data ranks in words."""
        if isinstance(self.microbatch, int):
            return f"(data({self.data}) * microbatch({self.microbatch}))"
        return f"sum(microbatch{list(self.microbatch)})"


_MOST = 16
"""Numbers that a message names one by one."""


class Violation(NamedTuple):
    """Why a layout is illegal: the field to blame and what holds, what was met, what would do.

    ``schedule.2`` is line 2, from 0, of an order that is written out.
    """

    field: str
    message: str


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as a message names them: of many the first ones and the last.

    >>> listed((3, 3, 1))
    '[3, 3, 1]'
    >>> listed(range(400_000))
    '[0, 1, 2, 3, 4, 5, 6, 7, ..., 399999]'
    """
    if len(numbers) <= _MOST:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[: _MOST // 2]))}, ..., {numbers[-1]}]"
