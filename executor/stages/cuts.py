"""Where a graph is cut into stages: at modules that a plan names, or so that the heaviest stage is lightest.

What depends on the batch and on no parameter, such as masks and positions, belongs to no stage: every stage that reads
it computes it.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import inf
from typing import Any

from torch import Tensor
from torch.fx import Node, map_arg
from torch.utils.flop_counter import FlopCounterMode

from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.stages.export import StepGraph, list_paths

FLOPS_PER_BYTE = 20.0
"""Floating-point operations in whose time about one byte is written, by which operators without products weigh."""


class CutError(UserError):
    """A module that has no such stages."""


def list_operators(step: StepGraph) -> list[Node]:
    """Return the operators of a graph that belong to stages, in order."""
    free_nodes = find_free_nodes(step)
    return [node for node in step.graph.nodes if node.op == "call_function" and node not in free_nodes]


def find_free_nodes(step: StepGraph) -> frozenset[Node]:
    """Return what depends on the batch and on numbers alone: on no parameter, no changed buffer, and no random draw."""
    free_nodes: set[Node] = set()
    new_values = set(step.updates.values())  # a buffer is renewed in one stage
    for node in step.graph.nodes:
        if node in new_values:
            continue
        if node.op == "placeholder":
            is_free = node.name not in step.parameters and step.buffers.get(node.name) not in step.updates
        elif node.op == "get_attr":
            is_free = True
        else:
            is_random = any("seeded" in str(tag) for tag in getattr(node.target, "tags", ()))
            is_free = node.op == "call_function" and not is_random and free_nodes.issuperset(node.all_input_nodes)
        if is_free:
            free_nodes.add(node)
    return frozenset(free_nodes)


def choose_cuts(
    step: StepGraph, operators: Sequence[Node], num_stages: int, paths: Sequence[str], blocks: frozenset[str]
) -> list[int]:
    """Return the places of the operators at which stages after the first begin.

    Parameters
    ----------
    paths
        Names of the modules at which they begin; none for stages of about equal work.
    blocks
        Names of the blocks of the module, between which it is cut where it has enough of them.

    Raises
    ------
    CutError
        Where a named module does not run, or there are fewer places than stages.
    """
    if num_stages == 1:
        return []
    is_trained = [bool(_list_read(step, node) & step.trained) for node in operators]
    if not paths:
        return _balance(operators, num_stages, blocks, is_trained)
    cuts = [_find_start(operators, path) for path in paths]
    if any(first >= second for first, second in pairwise([0, *cuts])):
        order = ", ".join(paths)
        raise CutError(f"cuts are modules in the order in which they run, after the first one, met {order}")
    for stage, (start, end) in enumerate(pairwise([0, *cuts, len(operators)])):
        if not any(is_trained[start:end]):
            met = f"met none in stage {stage}, from {(list_paths(operators[start]) or (operators[start].name,))[-1]}"
            raise CutError(f"every stage has parameters that are trained, {met}; nearest: {len(cuts)} stages")
    return cuts


def _list_read(step: StepGraph, node: Node) -> set[str]:
    """Return the names of the parameters that an operator reads."""
    names = (step.parameters.get(source.name) for source in node.all_input_nodes)
    return {name for name in names if name is not None}


def _find_start(operators: Sequence[Node], path: str) -> int:
    for place, node in enumerate(operators):
        if path in list_paths(node):
            return place
    known_paths = dict.fromkeys(known_path for node in operators for known_path in list_paths(node))
    matches = get_close_matches(path, known_paths, n=1)
    nearest = matches[0] if matches else ", ".join(list(known_paths)[:6])
    raise CutError(f"cuts are names of modules that run, met {path}; nearest: {nearest}")


def _balance(
    operators: Sequence[Node], num_stages: int, blocks: frozenset[str], is_trained: Sequence[bool]
) -> list[int]:
    """Return cuts between blocks where there are enough of them, else between modules, else between operators."""
    changes = [list_paths(node)[-1:] != list_paths(following)[-1:] for node, following in pairwise(operators)]
    module_places = [place for place, is_change in enumerate(changes, 1) if is_change]
    work = [0.0]
    for node in operators:
        work.append(work[-1] + measure_work(node))
    for places in (_list_places(operators, blocks), module_places, range(1, len(operators))):
        if cuts := _divide(num_stages, [0, *places, len(operators)], work, is_trained):
            return cuts
    met = f"met {num_stages} stages for {sum(is_trained)} of {len(operators)} operators with parameters"
    raise CutError(f"every stage has parameters that are trained, {met}; nearest: {max(sum(is_trained), 1)} stages")


def _divide(
    num_stages: int, bounds: Sequence[int], work: Sequence[float], is_trained: Sequence[bool]
) -> list[int] | None:
    """Return the bounds at which stages after the first begin, so that the heaviest is lightest; ``None`` for no way.

    >>> _divide(2, [0, 1, 2, 3], [0.0, 5.0, 6.0, 9.0], [True, True, True])
    [1]
    >>> _divide(3, [0, 2], [0.0, 1.0, 2.0], [True, True]) is None
    True
    """
    best: list[tuple[float, tuple[int, ...]]] = [(inf, ())] * len(bounds)
    best[0] = 0.0, ()
    for _ in range(num_stages):
        following: list[tuple[float, tuple[int, ...]]] = [(inf, ())] * len(bounds)
        for end in range(1, len(bounds)):
            options = [
                (max(best[start][0], work[bounds[end]] - work[bounds[start]]), (*best[start][1], bounds[start]))
                for start in range(end)
                if best[start][0] < inf and any(is_trained[bounds[start] : bounds[end]])
            ]
            following[end] = min(options, key=lambda option: option[0], default=(inf, ()))
        best = following
    return list(best[-1][1][1:]) if best[-1][0] < inf else None


def _list_places(operators: Sequence[Node], blocks: frozenset[str]) -> list[int]:
    """Return the places where a block begins, or what follows the last one."""
    names = [next((path for path in list_paths(node) if path in blocks), "") for node in operators]
    last = max((place for place, name in enumerate(names) if name), default=-1)
    return [
        place
        for place, (name, following) in enumerate(pairwise(names), 1)
        if name != following and (following or place == last + 1)
    ]


def measure_work(node: Node) -> float:
    """Return the floating-point operations of an operator in forward; bytes that it writes count as some."""
    value = node.meta.get("val")
    outputs = value if isinstance(value, tuple | list) else [value]
    num_bytes = sum(output.numel() * output.element_size() for output in outputs if isinstance(output, Tensor))
    counter = FlopCounterMode(display=False)
    fakes = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    with counter:
        target: Any = node.target
        target(*fakes[0], **fakes[1])
    return counter.get_total_flops() + FLOPS_PER_BYTE * num_bytes
