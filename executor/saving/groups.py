"""An optimizer's states as torch's ``get_state_dict`` gives them: by parameter, beside groups with options."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwise.executor.saving.names import STATE

PARAMETERS = "params"
Groups = list[dict[str, Any]]


def nest_states(states: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the states of an optimizer by parameter and name, beside its groups.

    >>> nest_states({"state.a.b.step": 1, "param_groups.a.b.lr": 0.1}, [{"lr": 0.1, "params": ["a.b"]}])
    {'state': {'a.b': {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': ['a.b']}]}
    """
    nested: dict[str, dict[str, Any]] = {}
    for key, value in states.items():
        if key.startswith(STATE):
            name, _, state = key.removeprefix(STATE).rpartition(".")
            nested.setdefault(name, {})[state] = value
    return {"state": nested, "param_groups": groups}


def list_groups(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> Groups:
    """Return the groups of an optimizer with the names of the parameters of all ranks, each of which may have others.

    Parameters
    ----------
    names
        Those of this rank's parameters.
    """
    own = [
        {**group, PARAMETERS: [names[parameter] for parameter in group[PARAMETERS] if parameter in names]}
        for group in optimizer.param_groups
    ]
    if not dist.is_initialized():
        return own
    everyone: list[Groups] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return join_groups(everyone)


def join_groups(ranks: Sequence[Groups]) -> Groups:
    """Return the groups of all ranks, each with the parameters of every rank.

    Groups of equal options in the same place are one. Where ranks have other numbers of them, as of layers of their
    own, their options alone tell.

    >>> join_groups([[{"lr": 1, "params": ["a"]}], [{"lr": 1, "params": ["b", "a"]}]])
    [{'lr': 1, 'params': ['a', 'b']}]
    >>> join_groups([[{"lr": 1, "params": ["a"]}], [{"lr": 1, "params": ["b"]}, {"lr": 2, "params": ["c"]}]])
    [{'lr': 1, 'params': ['a', 'b']}, {'lr': 2, 'params': ['c']}]
    """
    has_equal_counts = len({len(groups) for groups in ranks}) == 1
    joint: dict[Any, dict[str, Any]] = {}
    for groups in ranks:
        for place, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key != PARAMETERS}
            key = place if has_equal_counts else None, repr(options)
            entry = joint.setdefault(key, options | {PARAMETERS: []})
            entry[PARAMETERS] += [name for name in group[PARAMETERS] if name not in entry[PARAMETERS]]
    return list(joint.values())
