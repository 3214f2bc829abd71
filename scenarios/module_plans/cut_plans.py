"""How the operators of a module are cut over ranks, one way for every axis and size of it: `choose_cut_plans`."""

from collections.abc import Iterator, Sequence

from meshwise.executor.modules.layout import CUTS, CutAxes
from meshwise.scenarios.inputs.operator_cuts import choose_cuts, has_experts
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.plan import Plan


def choose_cut_plans(graph: OperatorGraph, batch: int, numbers: Sequence[int]) -> dict[CutAxes, Plan]:
    """Return plans that cut operators, by the axis over which they do; none where no operator can be cut.

    They are chosen once for an axis and its size: ratios of work to bytes hardly depend on samples.

    Parameters
    ----------
    numbers
        Numbers of all ranks.
    """
    plans: dict[CutAxes, Plan] = {}
    for size in sorted({divisor for number in numbers for divisor in divisors(number)[1:]}):
        samples = max(batch * size // max(numbers), 1)
        for word in _list_words(graph, batch, numbers):
            try:
                plan = choose_cuts(graph, data=1, samples=samples, num_microbatches=1, **{word: size})
            except ValueError:
                continue
            plans[((CUTS[word], size),)] = plan
    return plans


def _list_words(graph: OperatorGraph, batch: int, numbers: Sequence[int]) -> Iterator[str]:
    """Yield the words of cuts that may be worth their ranks.

    Sequences are cut where ranks cannot all have samples of their own: data parallelism sends less.
    """
    yield "tensor"
    if any(batch % number for number in numbers):
        yield "context"
    if has_experts(graph):
        yield "expert"
