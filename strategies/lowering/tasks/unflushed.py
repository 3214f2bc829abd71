"""Steps in a row without a flush: PipeDream updates weights after every backward, 2BW once a step and later.

PipeDream updates the weights of a stage as soon as the gradients of one microbatch, one round of replicas, are summed
over data ranks [1]_. 2BW accumulates the gradients of the microbatches of a step. Gradients of step ``t`` are made with
the weights that the update of step ``t - 2`` left, so that the update of step ``t`` is due before the first forward of
step ``t + 2`` of its stage [2]_. Where gradients are summed beneath passes or with those of another stage (tied
parameters), or the host steps, the update waits until then, and at the longest until the last backward of step
``t + 1``, which fills a second buffer of gradients; else it follows the last backward of step ``t`` at once.

References
----------
.. [1] Narayanan et al., "PipeDream", SOSP 2019, sections 3.2 (replicated stages) and 3.3 (weight stashing).
.. [2] Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1: the gradients
   of W(t - 1) make W(t + 1) of W(t), and the two versions suffice.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from meshwise.simulator.program import IntArray, Steps, StreamKind
from meshwise.strategies.lowering.rank_classes.placement import tied_kind
from meshwise.strategies.lowering.tasks.program import Frame
from meshwise.strategies.lowering.tasks.residents import Updates
from meshwise.strategies.lowering.tasks.shape import StepShape
from meshwise.strategies.lowering.tasks.skeleton import Site, Skeleton, Waits
from meshwise.strategies.lowering.tasks.step import Chain, Step
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.schedules.orders import in_order
from meshwise.strategies.schedules.schedule import Action, ActionKind


@lru_cache(maxsize=64)
def unflushed(shape: StepShape, when: Updates, count: int) -> Skeleton:
    """Return the abstract tasks of ``num_steps`` steps in a row, each of the shape of one."""
    return _Unflushed(shape, when, count).build()


def steps(tasks: Skeleton, place: Frame, plan: Plan) -> Steps:
    """Return the tasks of every step; tasks of one template on one class are in the order in which they run.

    Launches are left out: they wait only for each other, and so may run ahead of all other tasks for ever.
    """
    assert tasks.step_of is not None
    counts = np.array([len(found) for found in place.instances], dtype=np.int64)
    step = np.repeat(tasks.step_of, counts[tasks.slot_of])
    launches = np.array([any(kind is StreamKind.LAUNCH for _, kind in slot.streams) for slot in tasks.slots])
    kept = np.flatnonzero(np.repeat(~launches[tasks.slot_of], counts[tasks.slot_of]))
    order: IntArray = kept[np.lexsort((place.rows[kept], step[kept]))]
    return Steps(order.reshape(int(step.max()) + 1, -1), plan.depth)


class _Unflushed(Step):
    """Abstract tasks of many steps while they are collected.

    Attributes
    ----------
    due_steps
        For each position the steps whose update is still to come.
    gradient_ends
        By position and step, the tasks that end its gradients.
    summed_ties
        The tied parameters, each with a step, whose gradients are summed.
    weight_updates
        By position and step, the end of the update of weights, for which a later step's first forward waits.
    """

    def __init__(self, shape: StepShape, when: Updates, count: int) -> None:
        super().__init__(shape._replace(microbatches=count * shape.microbatches))
        self.microbatches, self.when = shape.microbatches, when
        self.step, self.step_of = 0, list[int]()
        self.due: list[list[int]] = [[] for _ in range(shape.ranks)]
        self.made: dict[tuple[int, int], tuple[int | None, ...]] = {}
        self.tied: set[tuple[int, int]] = set()
        self.weights: dict[tuple[int, int], int | None] = {}

    def build(self) -> Skeleton:
        """Return the abstract tasks of all steps."""
        for actions in in_order(self.order):
            self.add_actions(actions)
        for position, due in enumerate(self.due):
            while due:
                self._renew(position, due.pop(0))
        return replace(self.skeleton(), step_of=np.array(self.step_of, dtype=np.int64))

    def task(self, slot: int, microbatch: int, waits: Waits) -> int:
        self.step_of.append(self.step)
        return super().task(slot, microbatch, waits)

    def tasks(self, slots: list[int], microbatch: int) -> None:
        self.step_of += [self.step] * len(slots)
        super().tasks(slots, microbatch)

    def is_final(self, action: Action) -> bool:
        return action.kind is ActionKind.BACKWARD and (action.microbatch + 1) % self.when.every == 0

    def awaited(self, action: Action) -> list[int | None]:
        step, number = divmod(action.microbatch, self.microbatches)
        first = action.kind is ActionKind.FORWARD and number == 0
        weights = self.weights.pop((self.order.rank_of(action.stage), step - 2), None) if first else None
        return [*super().awaited(action), weights]

    def add_actions(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            position, step = self.order.rank_of(action.stage), action.microbatch // self.microbatches
            latest = step - (2 if action.kind is ActionKind.FORWARD else 1)
            while self.due[position] and self.due[position][0] <= latest and self._needs_update(action):
                self._renew(position, self.due[position].pop(0))
            self.step = step
            super().add_actions((action,))
            if self.is_final(action):
                self._finish(position, step)

    def _needs_update(self, action: Action) -> bool:
        """Return whether an action is the first forward of a step or its last backward."""
        number = action.microbatch % self.microbatches
        return number == (0 if action.kind is ActionKind.FORWARD else self.microbatches - 1)

    def _finish(self, position: int, step: int) -> None:
        """Sum the gradients that a position has made, and update its weights now or when that is due."""
        self._sum(position)
        self.made[position, step] = (*self.chain[position].ends, self.leaving[position])
        self._tie(step)
        if not self.when.late[position]:
            self._renew(position, step)
            return
        if self.shape.reductions[position]:  # not beneath passes
            self.chain[position] = Chain(self.made[position, step][-1])
        if self.shape.updates[position].steps and not self.shape.tied:
            self._renew(position, step)
        else:
            self.due[position].append(step)

    def _tie(self, step: int) -> None:
        """Sum the gradients of a step's tied parameters where both positions have made theirs."""
        for number, (first, second, legs) in enumerate(self.shape.tied):
            pair = (first, second)
            if (number, step) in self.tied or any((position, step) not in self.made for position in pair):
                continue
            self.tied.add((number, step))
            streams = ((first, StreamKind.DATA), (second, StreamKind.DATA))
            for leg in range(legs):
                waits = [(task, p) for p in pair for task in self.made[p, step]] if leg == 0 else []
                summed = self.add(Site(tied_kind(*pair), first), "tied", (number, leg), streams, -1, waits)
                self.leaving[first] = self.leaving[second] = summed

    def _renew(self, position: int, step: int) -> None:
        """Update the weights of a position, after which its passes go on.

        Where updates are late, only the first forward with the new weights waits for host and gather.
        """
        self.step, passes = step, self.chain[position]
        self.chain[position] = replace(passes)
        self._update(position)
        updated = self.chain[position].tail
        self._gather(position)
        done = self.leaving[position] if self.shape.gathers[position] else updated
        if not self.when.late[position]:
            self.chain[position] = Chain(done)
            return
        self.weights[position, step] = done
        self.chain[position] = passes if self.shape.updates[position].steps else Chain(updated)
