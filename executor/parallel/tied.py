"""Tied embeddings: the token table is also the output weight, and each end of a pipeline has a copy.

Both ends begin with the same table. Once a step, when gradients have been summed over data ranks, those of the two
ends are added [1]_, so that both copies stay equal. Where both ends are on one rank, as with schedules in a V, they are
one parameter; where they are sharded (ZeRO 2 and 3), each end belongs to the unit of its block.

References
----------
.. [1] Shoeybi et al. 2019, "Megatron-LM": the word embedding is also the output layer; with a pipeline its gradient is
   summed between the first and the last stage.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from meshwise.executor.model.network import Network
from meshwise.executor.recording.tensors import to_local
from meshwise.strategies.plan.mesh import PIPELINE
from meshwise.strategies.plan.plan import Plan


class TiedTable:
    """This rank's ends of the table that the first and the last block of a model share.

    ``is_split`` says whether these blocks are on two stages. Every rank of the mesh must make one, because the ranks of
    the two ends form process groups. ``networks`` are the stages of this rank, with parameters not yet sharded.
    """

    def __init__(self, plan: Plan, networks: Mapping[int, Network]) -> None:
        of_block = {block: stage for stage, stage_plan in enumerate(plan.stages) for block in stage_plan.blocks}
        ends = (of_block["embedding"], of_block["head"])
        first_position, last_position = (plan.positions[stage] for stage in ends)
        self.is_split = ends[0] != ends[1]
        self.embedding = networks[ends[0]].embedding if ends[0] in networks else None
        self.head = networks[ends[1]].head if ends[1] in networks else None
        self.group: dist.ProcessGroup | None = None
        if first_position != last_position:
            pairs = plan.mesh.rows(PIPELINE)[:, [first_position, last_position]].tolist()
            self.group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call]
        elif self.embedding is not None and self.head is not None and plan.zero < 2:
            self.head.logits.weight = self.embedding.token.weight

    @property
    def ends(self) -> tuple[nn.Parameter, ...]:
        """The parameters of this rank that are the table: that of the first block, then that of the last."""
        modules = [self.embedding and self.embedding.token, self.head and self.head.logits]
        parameters = (parameter for module in modules if module is not None for parameter in module.parameters())
        return tuple(dict.fromkeys(parameters))

    @property
    def shared(self) -> nn.Parameter | None:
        """The table, where two stages of this rank share it as one parameter."""
        is_shared = self.is_split and self.embedding is not None and self.head is not None and len(self.ends) == 1
        return self.ends[0] if is_shared else None

    @property
    def copies(self) -> Sequence[nn.Parameter]:
        """The end that a norm over all parameters leaves out: that of the first block, where there are two copies."""
        return self.ends[:1] if self.is_split and self.shared is None and self.embedding is not None else ()

    def sum_gradients(self) -> None:
        """Add the gradients of both ends."""
        gradients = [to_local(end.grad) for end in self.ends if end.grad is not None]
        if len(gradients) == 2:
            gradients[0].copy_(gradients[1].add_(gradients[0]))
        elif gradients and self.group is not None and gradients[0].numel():
            dist.all_reduce(gradients[0], group=self.group)
