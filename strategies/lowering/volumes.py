"""What the communications of a plan move: the collective of each, and its bytes."""

from math import ceil

from simulator.collective_kinds import Collective
from strategies.lowering.clipping import SQUARES
from strategies.lowering.cuts import Cuts
from strategies.lowering.data import SHARED, reduced_bytes, reduction, replica_sum
from strategies.lowering.parameters import Parameters
from strategies.lowering.replicated import summed_share
from strategies.lowering.skeleton import Slot
from strategies.mesh import EXPERT_DATA, OPERATOR_AXES, REPLICA

Volume = tuple[Collective, float]
"""A collective, and the bytes that it is given."""


class Volumes:
    """What the communications of one plan move outside its passes."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts, self.plan, self.costs = cuts, cuts.plan, cuts.costs
        self.training = cuts.training
        self._boundaries: dict[tuple[int, int], Volume] = {}

    def gradients(self, stage: int, bucket: int) -> Volume:
        """Return the reduction of a bucket of a stage."""
        size = reduced_bytes(self.training, self.plan)
        return reduction(self.plan), float(self.cuts.buckets(stage)[bucket].parameters * size)

    def all_gradients(self, kind: str, position: int) -> Volume:
        """Return the reduction of all gradients of a position that the groups of a kind share."""
        return reduction(self.plan), float(self.shared(kind, position) * reduced_bytes(self.training, self.plan))

    def updated(self, kind: str, position: int) -> Volume:
        """Return the gather of the parameters that the optimizer has updated as shards."""
        return Collective.ALL_GATHER, float(self.shared(kind, position) * self.training.updated_bytes)

    def replica_sum(self, kind: str, elements: int) -> Volume:
        """Return the sum over replicas of a rank's share of so many gradients."""
        return replica_sum(self.training, self.plan, kind, elements)

    def unit(self, kind: str, stage: int, block: int) -> Volume:
        """Return the gather of the parameters of a block by the groups of a kind."""
        cost = self.cuts.plan_costs.stages[stage].blocks[block]
        elements = cost.experts if kind == EXPERT_DATA else cost.parameters - cost.experts
        return Collective.ALL_GATHER, float(elements * self.training.parameter_bytes)

    def boundary(self, stage: int, batch: int) -> Volume:
        """Return the send of what one microbatch of a stage gives the next one, of ``batch`` sequences as in `Rank`."""
        if (stage, batch) not in self._boundaries:
            size = self.plan.boundary_part(self.costs.boundary_bytes(self.costs.seen(self.plan, batch), stage))
            self._boundaries[stage, batch] = Collective.SEND, size
        return self._boundaries[stage, batch]

    def replicated(self, axis: str, position: int) -> Volume:
        """Return the sum of the gradients at a position that each rank along an axis has of its own part."""
        elements = summed_share(self.plan, self.held(position).replicated[OPERATOR_AXES.index(axis)])
        return Collective.ALL_REDUCE, float(elements * self.training.gradient_bytes)

    def tied_sum(self, elements: int) -> Volume:
        """Return the sum of the gradients of a tied parameter."""
        share = ceil(elements / self.plan.shards) if self.cuts.sharing.gradients else elements
        return Collective.ALL_REDUCE, float(share * self.training.gradient_bytes)

    def shared(self, kind: str, position: int) -> int:
        """Return the parameters of a position that the groups of a kind share."""
        held = self.held(position)
        return held.experts if kind == EXPERT_DATA else held.elements - held.experts

    def held(self, position: int) -> Parameters:
        """Return the parameters on a rank of a position."""
        return self.cuts.plan_costs.held.positions[position]

    def at_the_end(self, slot: Slot) -> tuple[int, int, Volume, str]:
        """Return stage, phase, volume and name of a communication of gradients or parameters."""
        position, key = slot.site.position, slot.key
        if slot.what == "unshard":
            name = self.plan.stages[key[0]].blocks[key[1]]
            what = "experts" if slot.site.kind == EXPERT_DATA else "parameters"
            return key[0], key[2], self.unit(slot.site.kind, key[0], key[1]), f"{what} of {name}"
        over_replicas = slot.site.kind == REPLICA
        if slot.what == "reduce" and key[0] >= 0:
            bucket = self.cuts.buckets(key[0])[key[1]]
            sums = self.replica_sum(bucket.kind, bucket.parameters) if over_replicas else self.gradients(*key[:2])
            return key[0], key[2], sums, f"gradients of {bucket.blocks[-1]} .. {bucket.blocks[0]}"
        if slot.what == "reduce" and over_replicas:
            kind = SHARED[key[1]]
            return -1, key[2], self.replica_sum(kind, self.shared(kind, position)), "gradients of all blocks"
        if slot.what == "reduce":
            return -1, key[2], self.all_gradients(slot.site.kind, position), "gradients of all blocks"
        if slot.what == "norm":
            return -1, key[0], SQUARES, "norm of gradients"
        if slot.what == "replicated":
            return -1, key[0], self.replicated(slot.site.kind, position), "gradients of replicated parameters"
        if slot.what == "gather":
            return -1, key[0], self.updated(slot.site.kind, position), "parameters"
        return -1, key[1], self.tied_sum(self.cuts.tied[key[0]][2]), "tied gradients"
