"""How the operators of a module are cut over ranks, one way for every number of them: `choose_cut_plans`."""

from collections.abc import Sequence

from meshwise.scenarios.inputs.operator_cuts import choose_cuts
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.plan import Plan


def choose_cut_plans(graph: OperatorGraph, batch: int, numbers: Sequence[int]) -> dict[int, Plan]:
    """Return plans that cut operators, by the number of ranks over which they do; none where no operator can be cut.

    They are chosen once for such a number: ratios of work to bytes hardly depend on samples.

    Parameters
    ----------
    numbers
        Numbers of all ranks.
    """
    plans: dict[int, Plan] = {}
    for tensor in sorted({divisor for number in numbers for divisor in divisors(number)[1:]}):
        samples = max(batch * tensor // max(numbers), 1)
        try:
            plans[tensor] = choose_cuts(graph, data=1, tensor=tensor, samples=samples, num_microbatches=1)
        except ValueError:
            continue
    return plans
