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
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import StreamKind
from meshwise.strategies.lowering.tasks.shape import StepShape
from meshwise.strategies.lowering.tasks.skeleton import Role, Site, Skeleton, Waits
from meshwise.strategies.lowering.tasks.step import Chain, StepBuilder
from meshwise.strategies.plan.mesh import tied_kind
from meshwise.strategies.schedules.orders import order_actions
from meshwise.strategies.schedules.schedule import Action, ActionKind


class UpdateSchedule(NamedTuple):
    """When stages update their weights.

    ``interval`` is the number of backwards of a stage between updates, and ``is_late`` says for every position whether
    its update waits until it is due.
    """

    interval: int
    is_late: tuple[bool, ...]


@lru_cache(maxsize=64)
def build_unflushed(shape: StepShape, update_schedule: UpdateSchedule, num_steps: int) -> Skeleton:
    """Return the abstract tasks of ``num_steps`` steps in a row, each of the shape of one."""
    return _UnflushedBuilder(shape, update_schedule, num_steps).build()


class _UnflushedBuilder(StepBuilder):
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

    def __init__(self, shape: StepShape, update_schedule: UpdateSchedule, num_steps: int) -> None:
        super().__init__(shape._replace(microbatches=num_steps * shape.microbatches))
        self.microbatches, self.update_schedule = shape.microbatches, update_schedule
        self.current_step, self.step_of = 0, list[int]()
        self.due_steps: list[list[int]] = [[] for _ in range(shape.ranks)]
        self.gradient_ends: dict[tuple[int, int], tuple[int | None, ...]] = {}
        self.summed_ties: set[tuple[int, int]] = set()
        self.weight_updates: dict[tuple[int, int], int | None] = {}

    def build(self) -> Skeleton:
        """Return the abstract tasks of all steps."""
        for actions in order_actions(self.order):
            self.add_actions(actions)
        for position, due_steps in enumerate(self.due_steps):
            while due_steps:
                self._renew_weights(position, due_steps.pop(0))
        return replace(self.build_skeleton(), step_of=np.array(self.step_of, dtype=np.int64))

    def append_task(self, template: int, microbatch: int, waits: Waits) -> int:
        self.step_of.append(self.current_step)
        return super().append_task(template, microbatch, waits)

    def append_tasks(self, templates: list[int], microbatch: int) -> None:
        self.step_of += [self.current_step] * len(templates)
        super().append_tasks(templates, microbatch)

    def is_final(self, action: Action) -> bool:
        return action.kind is ActionKind.BACKWARD and (action.microbatch + 1) % self.update_schedule.interval == 0

    def list_awaited(self, action: Action) -> list[int | None]:
        step, number = divmod(action.microbatch, self.microbatches)
        is_first = action.kind is ActionKind.FORWARD and number == 0
        weight_update = (
            self.weight_updates.pop((self.order.find_rank(action.stage), step - 2), None) if is_first else None
        )
        return [*super().list_awaited(action), weight_update]

    def add_actions(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            position, step = self.order.find_rank(action.stage), action.microbatch // self.microbatches
            latest = step - (2 if action.kind is ActionKind.FORWARD else 1)
            while self.due_steps[position] and self.due_steps[position][0] <= latest and self._needs_update(action):
                self._renew_weights(position, self.due_steps[position].pop(0))
            self.current_step = step
            super().add_actions((action,))
            if self.is_final(action):
                self._finish_step(position, step)

    def _needs_update(self, action: Action) -> bool:
        """Return whether an action is the first forward of a step or its last backward."""
        number = action.microbatch % self.microbatches
        return number == (0 if action.kind is ActionKind.FORWARD else self.microbatches - 1)

    def _finish_step(self, position: int, step: int) -> None:
        """Sum the gradients that a position has made, and update its weights now or when that is due."""
        self._sum_gradients(position)
        self.gradient_ends[position, step] = (*self.chains[position].ends, self.last_reductions[position])
        self._sum_tied(step)
        if not self.update_schedule.is_late[position]:
            self._renew_weights(position, step)
            return
        if self.shape.reductions[position]:  # not beneath passes
            self.chains[position] = Chain(self.gradient_ends[position, step][-1])
        if self.shape.updates[position].steps and not self.shape.tied_sums:
            self._renew_weights(position, step)
        else:
            self.due_steps[position].append(step)

    def _sum_tied(self, step: int) -> None:
        """Sum the gradients of a step's tied parameters where both positions have made theirs."""
        for number, (first_position, second_position, num_phases) in enumerate(self.shape.tied_sums):
            pair = (first_position, second_position)
            if (number, step) in self.summed_ties or any(
                (position, step) not in self.gradient_ends for position in pair
            ):
                continue
            self.summed_ties.add((number, step))
            streams = ((first_position, StreamKind.DATA), (second_position, StreamKind.DATA))
            for phase in range(num_phases):
                waits = (
                    [
                        (task, tied_position)
                        for tied_position in pair
                        for task in self.gradient_ends[tied_position, step]
                    ]
                    if phase == 0
                    else []
                )
                sum_task = self.add_task(
                    Site(tied_kind(*pair), first_position), Role.TIED, (number, phase), streams, -1, waits
                )
                self.last_reductions[first_position] = self.last_reductions[second_position] = sum_task

    def _renew_weights(self, position: int, step: int) -> None:
        """Update the weights of a position, after which its passes go on.

        Where updates are late, only the first forward with the new weights waits for host and gather.
        """
        self.current_step, pass_chain = step, self.chains[position]
        self.chains[position] = replace(pass_chain)
        self._update_parameters(position)
        update_end = self.chains[position].tail
        self._gather_parameters(position)
        last_task = self.last_reductions[position] if self.shape.gathers[position] else update_end
        if not self.update_schedule.is_late[position]:
            self.chains[position] = Chain(last_task)
            return
        self.weight_updates[position, step] = last_task
        self.chains[position] = pass_chain if self.shape.updates[position].steps else Chain(update_end)
