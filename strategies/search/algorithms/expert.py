"""The guidelines of the field as rules, in place of a search.

References
----------
.. [1] Narayanan et al., "Efficient large-scale language model training on GPU clusters using
   Megatron-LM", SC 2021, section 3: tensor parallelism up to the devices of a node and then
   pipeline parallelism; only as much model parallelism as the memory needs, the rest data
   parallelism; the microbatch is to be tried out.
.. [2] Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
   SC 2020, section 7: levels 1 and 2 communicate no more than data parallelism, level 3 half as
   much again.
.. [3] Korthikanti et al., "Reducing activation recomputation in large transformer models",
   MLSys 2023: sequence parallelism wherever there is tensor parallelism; selective
   recomputation costs little, full recomputation about a forward pass.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.proposals import Proposals, Upcoming
from meshwise.strategies.search.space import MOST_LISTED, Space, list_layouts


@dataclass(frozen=True, slots=True)
class Expert:
    """Guidelines of the field, tried in order (Megatron-LM, SC 2021).

    The search takes the first degrees that fit in the order of the rules, with the other decisions of the rules; then
    it tries all microbatches, and with the best one all schedules. So it goes on with the next degrees, until
    ``choices`` degrees have been tried.

    The rules, in order of weight: no tensor parallelism across nodes; no full recomputation; no ZeRO 3; the least model
    parallelism (data parallelism if it fits); the least pipeline parallelism of that, so tensor parallelism first; no
    selective recomputation; the smallest microbatch; 1f1b; ZeRO 1; sequence parallelism.

    Parameters
    ----------
    choices
        Number of different degrees that are tried.
    """

    name: ClassVar[str] = "expert"
    most_plans: ClassVar[int] = MOST_LISTED

    choices: int = 8

    def __post_init__(self) -> None:
        if self.choices < 1:
            raise ValueError(f"expert: choices is at least 1, met {self.choices}; nearest: 1")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of the guidelines; prove nothing."""
        layouts = _list_by_guidelines(problem, space)
        tried_degrees: set[tuple[int, ...]] = set()
        for layout in layouts:
            degrees = layout.data, layout.tensor, layout.tensor_rows, layout.pipeline
            if degrees in tried_degrees or not costs.fits(complete(problem, layout)):
                continue
            sized_variants = _list_variants(layouts, layout, microbatch=0)
            sized_layout = yield from _find_fastest(problem, costs, sized_variants)
            timed_variants = _list_variants(layouts, sized_layout, schedule="", chunks=0, stages="")
            yield from _find_fastest(problem, costs, timed_variants)
            tried_degrees.add(degrees)
            if len(tried_degrees) == self.choices:
                break
        return None


def _list_by_guidelines(problem: Problem, space: Space) -> list[Layout]:
    """Return the layouts of ``space`` in the order of the rules."""
    node = problem.cluster.first_node.devices

    def key(layout: Layout) -> tuple[int, ...]:
        return (
            layout.tensor * layout.tensor_rows > node,
            layout.recompute is Recompute.FULL,
            layout.zero == 3,
            layout.tensor * layout.tensor_rows * layout.pipeline,
            layout.pipeline,
            layout.recompute is Recompute.SELECTIVE,
            layout.sequences,
            layout.schedule != "1f1b",
            layout.zero != 1,
            not layout.sequence_parallel,
        )

    return sorted(list_layouts(problem, space), key=key)


def _find_fastest(
    problem: Problem, costs: CostModel, variants: Iterable[Layout]
) -> Generator[Plan | Upcoming, Evaluation, Layout]:
    """Yield the variants that fit, at least one; return the fastest layout."""
    plans = {layout: complete(problem, layout) for layout in variants}
    fitting_plans = {layout: plan for layout, plan in plans.items() if costs.fits(plan)}
    yield Upcoming(tuple(fitting_plans.values()))  # all are evaluated, so an executor may take them at once
    times: dict[Layout, float] = {}
    for layout, plan in fitting_plans.items():
        times[layout] = (yield plan).step_time
    return min(times, key=times.__getitem__)


def _list_variants(layouts: Iterable[Layout], layout: Layout, **constants: Any) -> Iterator[Layout]:
    """Yield the layouts that differ from ``layout`` at most in the fields that ``constants`` replace."""
    base_layout = replace(layout, **constants)
    return (candidate for candidate in layouts if replace(candidate, **constants) == base_layout)
