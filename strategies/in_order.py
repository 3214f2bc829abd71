"""An order in which the actions of all pipeline ranks can run, or why their own orders wait for ever."""

from collections.abc import Iterator

from strategies.schedule import Action, ActionKind, OrderError, Schedule


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


def in_order(schedule: Schedule) -> Iterator[tuple[Action, ...]]:
    """Yield every action after the one it requires, each pipeline rank's in its own order; those that overlap together.

    Raises
    ------
    ValueError
        Where the orders wait for each other for ever; the message names ranks of which each waits for the next.
    """
    done: set[Action] = set()
    orders = _together(schedule)
    position = [0] * schedule.num_ranks
    found, total = 0, sum(map(len, orders))
    while found < total:
        before = found
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                actions = order[position[rank]]
                if any(needed is not None and needed not in done for needed in _needed(schedule, actions)):
                    break
                done.update(map(_unsplit, actions))
                position[rank] += 1
                found += 1
                yield actions
        if found == before:
            stuck = {rank: order[position[rank]] for rank, order in enumerate(orders) if position[rank] < len(order)}
            raise _deadlock(schedule, stuck, done)


def _together(schedule: Schedule) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Return the order of every rank, with the two actions of a pair as one item."""
    pairs = dict(schedule.overlapped)
    seconds = set(pairs.values())
    return tuple(
        tuple((action, pairs[action]) if action in pairs else (action,) for action in order if action not in seconds)
        for order in schedule.orders
    )


def _needed(schedule: Schedule, actions: tuple[Action, ...]) -> Iterator[Action | None]:
    return (requirement(schedule, action) for action in actions)


def _unsplit(action: Action) -> Action:
    """Return the action that others wait for: where gradients come from inputs alone, as of a whole backward."""
    return action._replace(kind=ActionKind.BACKWARD) if action.kind is ActionKind.INPUT else action


def _deadlock(schedule: Schedule, stuck: dict[int, tuple[Action, ...]], done: set[Action]) -> OrderError:
    """Return the error that names a cycle of ranks of which each waits for the next, and the last for the first.

    ``stuck`` are the next actions of the ranks that have not finished.
    """
    waits: dict[int, tuple[Action, Action]] = {}
    for rank, actions in stuck.items():
        pairs = zip(actions, _needed(schedule, actions), strict=True)
        waits[rank] = next((action, needed) for action, needed in pairs if needed is not None and needed not in done)
    path, rank = list[int](), min(waits)
    while rank not in path:
        path.append(rank)
        rank = schedule.rank_of(waits[rank][1].stage)
    cycle = path[path.index(rank) :]
    words = "; ".join(_words(schedule, rank, *waits[rank]) for rank in cycle)
    return OrderError(f"schedule {schedule.name} cannot finish: {words}", cycle[0])


def _words(schedule: Schedule, rank: int, action: Action, needed: Action) -> str:
    """Return what a rank wants to do and whom it waits for."""
    peer = schedule.rank_of(needed.stage)
    whom = f"rank {peer}" if peer != rank else "its own order, further on"
    what = f"{_NAMES[action.kind]} of microbatch {action.microbatch} through stage {action.stage}"
    return f"rank {rank} at {action} ({what}) waits for {needed} of {whom}"


_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "gradients of inputs",
    ActionKind.WEIGHT: "gradients of weights",
}
