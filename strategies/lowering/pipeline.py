"""Pipeline parallel: the schedule's actions as tasks, and the transfers between stages."""

from collections.abc import Iterator

from strategies.plan import Plan
from strategies.schedule import Action, ActionKind, Schedule


def requirement(schedule: Schedule, action: Action) -> Action | None:
    """Return the action on another stage (or the same one's forward) that must come first.

    Gradients of weights follow those of inputs on the same rank; those of inputs are asked for as ``B``.
    """
    stage, kind, microbatch = action
    if kind is ActionKind.FORWARD:
        return Action(stage - 1, kind, microbatch) if stage else None
    if kind is ActionKind.WEIGHT:
        return Action(stage, ActionKind.BACKWARD, microbatch)
    last = stage == schedule.num_stages - 1
    return Action(stage, ActionKind.FORWARD, microbatch) if last else Action(stage + 1, ActionKind.BACKWARD, microbatch)


def in_order(schedule: Schedule) -> Iterator[Action]:
    """Yield every action after the one it requires, each pipeline rank's in its own order.

    Raises
    ------
    ValueError
        Where the orders wait for each other for ever; the message names what each rank waits for.
    """
    done: set[Action] = set()
    position = [0] * schedule.num_ranks
    total = sum(map(len, schedule.orders))
    while len(done) < total:
        before = len(done)
        for rank, order in enumerate(schedule.orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                needed = requirement(schedule, action)
                if needed is not None and needed not in done:
                    break
                done.add(action._replace(kind=ActionKind.BACKWARD) if action.kind is ActionKind.INPUT else action)
                position[rank] += 1
                yield action
        if len(done) == before:
            raise ValueError(f"schedule {schedule.name} cannot finish: {_waits(schedule, position)}")


def _waits(schedule: Schedule, position: list[int]) -> str:
    stuck = [(r, order[position[r]]) for r, order in enumerate(schedule.orders) if position[r] < len(order)]
    return "; ".join(f"rank {rank} at {action} waits for {requirement(schedule, action)}" for rank, action in stuck)


def boundary_part(plan: Plan, size: float) -> float:
    """Return the bytes that one tensor rank sends of a boundary of ``size`` bytes.

    With ``scatter_gather`` each sends its slice, and the slices are gathered again in the receiving
    node (Narayanan et al., SC 2021, section 4.1).
    """
    return size / plan.tensor if slices(plan) else float(size)


def slices(plan: Plan) -> bool:
    """Return whether a stage boundary crosses in one slice a tensor rank."""
    return plan.scatter_gather and plan.tensor > 1 and not plan.sequence_parallel
