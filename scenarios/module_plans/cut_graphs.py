"""What a captured graph with measured times takes on one of the ranks over which its operators are cut."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from statistics import fmean

from meshwise.scenarios.inputs.operator_cuts import find_causal_imbalance
from meshwise.scenarios.module_plans.graphs import Line, fit_line, time_operator
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.operator_graph import BATCH, Block, MeasuredTime, Operator, OperatorGraph
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.sharding import OperatorSharding


def cut_times(graph: OperatorGraph, plan: Plan, samples: int, model: Accelerator) -> OperatorGraph:
    """Return a graph whose measured operators take what a rank's part of them does.

    That is the fraction of the measured time that the part takes of the whole operator on a model: small parts pay for
    their launch like large ones.

    Parameters
    ----------
    samples
        Those of a microbatch on a data rank.
    """
    degrees, shardings = count_degrees(plan), {sharding.operator: sharding for sharding in plan.shardings}

    def cut(block: Block, operator: Operator) -> Operator:
        if operator.measured is None:
            return operator
        plain = replace(operator, measured=None)
        forward, backward = (
            fmean(
                _find_fraction(model, block, plain, samples, direction, sharding, degrees)
                for sharding in _list_shardings(block, operator, shardings)
            )
            for direction in Pass
        )
        measured = operator.measured
        return replace(
            operator,
            measured=MeasuredTime(
                (measured.forward[0] * forward, measured.forward[1] * forward),
                (measured.backward[0] * backward, measured.backward[1] * backward),
            ),
        )

    blocks = (
        replace(block, operators=tuple(cut(block, operator) for operator in block.operators)) for block in graph.blocks
    )
    return replace(graph, blocks=tuple(blocks))


def share_times(graph: OperatorGraph, passes: tuple[float, float], samples: tuple[int, int]) -> OperatorGraph:
    """Return a graph whose measured operators together take measured passes, each the part that it took before.

    Parameters
    ----------
    passes
        Seconds of both passes with either number of samples.
    """
    more = samples[1]
    fixed, slope = fit_line(samples, passes)
    total = sum(
        block.repeat * (_evaluate(operator.measured.forward, more) + _evaluate(operator.measured.backward, more))
        for block in graph.blocks
        for operator in block.operators
        if operator.measured is not None
    )

    def share(line: Line) -> Line:
        fraction = _evaluate(line, more) / total
        # what takes as long for any number of samples goes on to do so
        return (fixed * fraction, slope * fraction) if line[1] else ((fixed + slope * more) * fraction, 0.0)

    def change(operator: Operator) -> Operator:
        measured = operator.measured
        if measured is None:
            return operator
        return replace(operator, measured=MeasuredTime(share(measured.forward), share(measured.backward)))

    blocks = (replace(block, operators=tuple(map(change, block.operators))) for block in graph.blocks)
    return replace(graph, blocks=tuple(blocks)) if total else graph


def _evaluate(line: Line, samples: int) -> float:
    return line[0] + line[1] * samples


def count_degrees(plan: Plan) -> dict[str, int]:
    """Return the ranks along each axis that cuts operators."""
    return {axis.name: axis.size for axis in plan.mesh.axes if axis.name in OPERATOR_AXES}


def _list_shardings(
    block: Block, operator: Operator, shardings: Mapping[str, OperatorSharding]
) -> Iterator[OperatorSharding | None]:
    """Yield the sharding of an operator in every occurrence of its block; ``None`` where it is whole."""
    common = shardings.get(f"{block.name}.{operator.name}")
    for name in block.names():
        yield shardings.get(f"{name}.{operator.name}", common)


def _find_fraction(
    model: Accelerator,
    block: Block,
    operator: Operator,
    samples: int,
    direction: Pass,
    sharding: OperatorSharding | None,
    degrees: Mapping[str, int],
) -> float:
    if sharding is None or not sharding.cuts:
        return 1.0
    parts = {dim: prod(degrees.get(axis, 1) for axis in axes) for dim, axes in sharding.cuts}
    whole = time_operator(model, block, operator, samples, direction)
    part = time_operator(model, block, operator, samples, direction, parts)
    return part * find_causal_imbalance(operator, sharding, degrees) / whole if whole else 1.0


def find_state_fraction(graph: OperatorGraph, plan: Plan) -> float:
    """Return the fraction of all elements of trained parameters that a rank has; tied ones count with their first."""
    degrees, shardings = count_degrees(plan), {sharding.operator: sharding for sharding in plan.shardings}
    tied = {(name, tensor) for _, (name, tensor) in graph.tied}
    total = own = 0.0
    for block in graph.blocks:
        for operator in block.operators:
            for parameter in operator.parameters:
                tensor = block.tensor[parameter]
                if not tensor.has_gradient or any((name, parameter) in tied for name in block.names()):
                    continue
                for sharding in _list_shardings(block, operator, shardings):
                    cuts = () if sharding is None else sharding.find_kept_spec(tensor).cuts
                    total += tensor.size
                    own += tensor.size / prod(degrees.get(axis, 1) for _, axes in cuts for axis in axes)
    return own / total if total else 1.0


def count_saved(graph: OperatorGraph, plan: Plan | None) -> float:
    """Return the bytes a sample of all values that backward reads, of a rank's part of them under a plan."""
    degrees = {} if plan is None else count_degrees(plan)
    shardings = {} if plan is None else {sharding.operator: sharding for sharding in plan.shardings}
    size = 0.0
    for block in graph.blocks:
        saved = {name for operator in block.operators for name in operator.saved}
        for operator in block.operators:
            for sharding in _list_shardings(block, operator, shardings):
                cuts = {} if sharding is None else dict(sharding.cuts)
                for name in saved.intersection(operator.outputs):
                    tensor = block.tensor[name]
                    parts = prod(degrees.get(axis, 1) for dim in tensor.dims for axis in cuts.get(dim, ()))
                    size += tensor.nbytes / parts if BATCH in tensor.dims else 0.0
    return size
