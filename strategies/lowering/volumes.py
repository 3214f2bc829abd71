"""Volumes: the collectives of a plan outside its passes, each with its bytes."""

from collections.abc import Callable
from math import ceil

from meshwise.simulator.collective import Collective
from meshwise.simulator.memo import memoise
from meshwise.strategies.lowering.costs.optimizer import NORM_SUM, Parameters
from meshwise.strategies.lowering.costs.weights import summed_elements
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.data_parallel import (
    SHARING_KINDS,
    Bucket,
    choose_reduction,
    reduction_bytes,
    replica_sum,
)
from meshwise.strategies.lowering.tasks.fully_sharded import Sharing
from meshwise.strategies.lowering.tasks.skeleton import Role, TaskTemplate
from meshwise.strategies.plan.mesh import EXPERT_DATA, OPERATOR_AXES, REPLICA
from meshwise.strategies.plan.plan import Plan

Volume = tuple[Collective, float]
"""A collective, and its bytes."""


class Volumes:
    """The collectives of one plan outside its passes, with their bytes.

    Parameters
    ----------
    sharing
        What data ranks share besides the optimizer's states.
    buckets
        Returns the buckets of a stage's gradients.
    """

    def __init__(
        self, costs: StageCosts, plan: Plan, sharing: Sharing, buckets: Callable[[int], tuple[Bucket, ...]]
    ) -> None:
        self.costs, self.plan, self.sharing, self.buckets = costs, plan, sharing, buckets
        self.training, self.plan_costs = costs.problem.training, costs.plan_costs(plan)
        self.tied_sums = costs.list_tied_shares(plan)

    def bucket_sum(self, stage: int, bucket: int) -> Volume:
        """Return the reduction of a bucket of a stage."""
        size = reduction_bytes(self.training, self.plan)
        return choose_reduction(self.plan), float(self.buckets(stage)[bucket].parameters * size)

    def gradient_sum(self, kind: str, position: int) -> Volume:
        """Return the reduction of all gradients of a position that the groups of a kind share."""
        return choose_reduction(self.plan), float(
            self.count_shared(kind, position) * reduction_bytes(self.training, self.plan)
        )

    def parameter_gather(self, kind: str, position: int) -> Volume:
        """Return the gather of the parameters that the optimizer has updated as shards."""
        return Collective.ALL_GATHER, float(self.count_shared(kind, position) * self.training.updated_bytes)

    def replica_sum(self, kind: str, elements: int) -> Volume:
        """Return the sum over replicas of a rank's share of ``elements`` gradients."""
        return replica_sum(self.training, self.plan, kind, elements)

    def unit_gather(self, kind: str, stage: int, block: int) -> Volume:
        """Return the gather of the parameters of a block by the groups of a kind."""
        cost = self.plan_costs.stages[stage].blocks[block].work
        elements = cost.expert_parameters if kind == EXPERT_DATA else cost.parameters - cost.expert_parameters
        return Collective.ALL_GATHER, float(elements * self.training.parameter_bytes)

    @memoise
    def boundary_send(self, stage: int, batch: int) -> Volume:
        """Return the send of one microbatch from a stage to the next; ``batch`` is that of a `RankProfile`."""
        keys = self.costs.find_keys(self.plan)
        sequences = batch or keys.run.sequences
        return Collective.SEND, self.costs.count_sent_bytes(keys.stages, stage, sequences, self.plan.slices_boundaries)

    def replicated_sum(self, axis: str, position: int) -> Volume:
        """Return the sum of the gradients at a position of parameters that ranks along an axis have whole."""
        elements = summed_elements(
            self.plan, self.position_parameters(position).replicated_elements[OPERATOR_AXES.index(axis)]
        )
        return Collective.ALL_REDUCE, float(elements * self.training.gradient_bytes)

    def tied_sum(self, elements: int) -> Volume:
        """Return the sum of the gradients of a tied parameter."""
        share = ceil(elements / self.plan.shards) if self.sharing.gradients else elements
        return Collective.ALL_REDUCE, float(share * self.training.gradient_bytes)

    def count_shared(self, kind: str, position: int) -> int:
        """Return the number of parameters of a position that the groups of a kind share."""
        parameters = self.position_parameters(position)
        return parameters.expert_elements if kind == EXPERT_DATA else parameters.elements - parameters.expert_elements

    def position_parameters(self, position: int) -> Parameters:
        """Return the parameters on a rank of a position."""
        return self.plan_costs.plan_parameters.positions[position]

    def describe_communication(self, template: TaskTemplate) -> tuple[int, int, Volume, str]:
        """Return stage, phase, volume and name of a communication of states; stage -1 stands for all stages."""
        position, key = template.site.position, template.key
        if template.role == Role.UNSHARD:
            name = self.plan.stages[key[0]].blocks[key[1]]
            content = "experts" if template.site.kind == EXPERT_DATA else "parameters"
            return key[0], key[2], self.unit_gather(template.site.kind, key[0], key[1]), f"{content} of {name}"
        over_replicas = template.site.kind == REPLICA
        if template.role == Role.REDUCE and key[0] >= 0:
            bucket = self.buckets(key[0])[key[1]]
            volume = self.replica_sum(bucket.kind, bucket.parameters) if over_replicas else self.bucket_sum(*key[:2])
            return key[0], key[2], volume, f"gradients of {bucket.blocks[-1]} .. {bucket.blocks[0]}"
        if template.role == Role.REDUCE and over_replicas:
            kind = SHARING_KINDS[key[1]]
            return -1, key[2], self.replica_sum(kind, self.count_shared(kind, position)), "gradients of all blocks"
        if template.role == Role.REDUCE:
            return -1, key[2], self.gradient_sum(template.site.kind, position), "gradients of all blocks"
        if template.role == Role.NORM:
            return -1, key[0], NORM_SUM, "norm of gradients"
        if template.role == Role.REPLICATED:
            return -1, key[0], self.replicated_sum(template.site.kind, position), "gradients of replicated parameters"
        if template.role == Role.GATHER:
            return -1, key[0], self.parameter_gather(template.site.kind, position), "parameters"
        assert template.role == Role.TIED
        return -1, key[1], self.tied_sum(self.tied_sums[key[0]][2]), "tied gradients"
