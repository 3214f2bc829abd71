"""The orders of a schedule as columns of numbers, and an order in which the actions of all ranks can run.

The columns have the actions of all pipeline ranks one after another. `order_actions` merges the ranks' orders into one
that respects dependencies, or says why they deadlock.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.schedules.schedule import (
    Action,
    ActionKind,
    Order,
    OrderError,
    Schedule,
    build_rank_order,
    find_rule,
)


class Orders(NamedTuple):
    """The passes of all pipeline ranks as columns: rank ``r`` runs rows ``start[r]:start[r + 1]`` in that order.

    ``passes`` are ``2 * stage``, and 1 more for a backward.
    """

    passes: Order
    microbatch: Order
    start: Order


@lru_cache(maxsize=512)
def list_orders(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Orders:
    """Return the orders of a schedule without split backwards, by name; cached, so do not change it.

    >>> list_orders("1f1b", 2, 2).passes.tolist()
    [0, 0, 1, 1, 2, 3, 2, 3]
    """
    rows = [build_rank_order(name, rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)]
    stage, backward, microbatch = np.concatenate(rows).T
    start = np.cumsum([0, *map(len, rows)])
    return Orders(2 * stage + backward, np.ascontiguousarray(microbatch), start)


class Actions(NamedTuple):
    """The actions of all pipeline ranks as columns: rank ``r`` runs rows ``start[r]:start[r + 1]`` in that order.

    ``kind`` is an index into `KINDS`; ``pairs_next`` says whether an action runs as one with the next.
    """

    stage: Order
    kind: Order
    microbatch: Order
    start: Order
    pairs_next: NDArray[np.bool_]


@lru_cache(maxsize=512)
def list_actions(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Actions:
    """Return the orders of any schedule by name, with backwards split or not; cached, so do not change it.

    >>> list_actions("zb1p", 1, 1).kind.tolist()
    [0, 2, 3]
    """
    rows = [build_rank_order(name, rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)]
    stage, kind, microbatch = map(np.ascontiguousarray, np.concatenate(rows).T)
    start = np.cumsum([0, *map(len, rows)])
    pairs_next = np.zeros(len(stage), np.bool_)
    for rank, pairs in enumerate(
        find_rule(name).pairs(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)
    ):
        pairs_next[start[rank] + np.array(pairs, np.int64)] = True
    return Actions(stage, kind, microbatch, start, pairs_next)


def find_requirement(schedule: Schedule, action: Action) -> Action | None:
    """Return the action that must run before another one; None for a forward of the first stage.

    A forward requires that of the stage before, a backward that of the stage behind, or, on the last stage, its own
    forward. Gradients of weights require those of inputs. The latter are named as a whole backward, ``B``.
    """
    stage, kind, microbatch = action
    if kind is ActionKind.FORWARD:
        return Action(stage - 1, kind, microbatch) if stage else None
    if kind is ActionKind.WEIGHT:
        return Action(stage, ActionKind.BACKWARD, microbatch)
    is_last = stage == schedule.num_stages - 1
    return (
        Action(stage, ActionKind.FORWARD, microbatch) if is_last else Action(stage + 1, ActionKind.BACKWARD, microbatch)
    )


def order_actions(schedule: Schedule) -> Iterator[tuple[Action, ...]]:
    """Yield all actions, each after the one it requires and each rank's in its own order; a pair is yielded together.

    Raises
    ------
    OrderError
        Where the orders deadlock; the message names the ranks of a cycle, each of which waits for the next.
    """
    done_actions: set[Action] = set()
    orders = _group_pairs(schedule)
    position = [0] * schedule.num_ranks
    num_yielded, total = 0, sum(map(len, orders))
    while num_yielded < total:
        num_before = num_yielded
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                actions = order[position[rank]]
                if _find_wait(schedule, actions, done_actions) is not None:
                    break
                # gradients of inputs are named as others require them: as a whole backward
                done_actions.update(
                    action._replace(kind=ActionKind.BACKWARD) if action.kind is ActionKind.INPUT else action
                    for action in actions
                )
                position[rank] += 1
                num_yielded += 1
                yield actions
        if num_yielded == num_before:
            stuck_actions = {
                rank: order[position[rank]] for rank, order in enumerate(orders) if position[rank] < len(order)
            }
            raise _build_deadlock_error(schedule, stuck_actions, done_actions)


def _group_pairs(schedule: Schedule) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Return the order of every rank, in which the two actions of a pair are one item."""
    pairs = dict(schedule.overlapped_pairs)
    second_actions = set(pairs.values())
    return tuple(
        tuple(
            (action, pairs[action]) if action in pairs else (action,)
            for action in order
            if action not in second_actions
        )
        for order in schedule.orders
    )


def _find_wait(
    schedule: Schedule, actions: tuple[Action, ...], done_actions: set[Action]
) -> tuple[Action, Action] | None:
    """Return the first of some actions that waits for one that is not done, with that; None where none waits."""
    for action in actions:
        requirement = find_requirement(schedule, action)
        if requirement is not None and requirement not in done_actions:
            return action, requirement
    return None


def _build_deadlock_error(
    schedule: Schedule, stuck_actions: dict[int, tuple[Action, ...]], done_actions: set[Action]
) -> OrderError:
    """Return the error that names a cycle of ranks, each of which waits for the next and the last for the first.

    ``stuck_actions`` are the next actions of the ranks that have not finished.
    """
    waits: dict[int, tuple[Action, Action]] = {}
    for rank, actions in stuck_actions.items():
        wait = _find_wait(schedule, actions, done_actions)
        assert wait is not None  # so the rank is stuck
        waits[rank] = wait
    # each stuck rank waits for a stuck rank, so the walk must return to one that it has seen
    path, rank = list[int](), min(waits)
    while rank not in path:
        path.append(rank)
        rank = schedule.find_rank(waits[rank][1].stage)
    cycle = path[path.index(rank) :]
    words = "; ".join(_describe_wait(schedule, rank, *waits[rank]) for rank in cycle)
    return OrderError(f"schedule {schedule.name} cannot finish: {words}", cycle[0])


def _describe_wait(schedule: Schedule, rank: int, action: Action, requirement: Action) -> str:
    """Return the words of what a rank is to do, and of what it waits for."""
    peer = schedule.find_rank(requirement.stage)
    peer_text = f"rank {peer}" if peer != rank else "its own order, further on"
    action_text = f"{_KIND_NAMES[action.kind]} of microbatch {action.microbatch} through stage {action.stage}"
    return f"rank {rank} at {action} ({action_text}) waits for {requirement} of {peer_text}"


_KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "gradients of inputs",
    ActionKind.WEIGHT: "gradients of weights",
}
