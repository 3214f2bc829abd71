"""Reinforcement learning of a policy that takes decisions. Needs torch.

References
----------
.. [1] Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
   learning", Machine Learning 8, 1992: REINFORCE, and baselines.
.. [2] Mirhoseini et al., "Device placement optimization with reinforcement learning", ICML 2017:
   the square root of the step time, a moving average as the baseline, a large fixed time where
   memory does not do.
.. [3] Huang, Ontanon, "A closer look at invalid action masking in policy gradient algorithms", FLAIRS 2022.
.. [4] Williams, Peng, "Function optimization using connectionist reinforcement learning algorithms",
   Connection Science 3(3), 1991: the entropy bonus.
.. [5] Petersen et al., "Deep symbolic regression: recovering mathematical expressions from data via
   risk-seeking policy gradients", ICLR 2021: a policy that is to find one good thing learns from the
   best part of its draws alone.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from math import inf, sqrt
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.decisions import DecisionTree, Outlooks
from meshwise.strategies.search.proposals import Proof, Proposals
from meshwise.strategies.search.space import MOST_LISTED, Space

OUT_OF_MEMORY = 2.0
"""The step time given to a plan that does not fit, over that of the first plan that fits; no plan counts as slower."""


@dataclass(frozen=True, slots=True)
class Reinforcement:
    """Policy gradient over a graph network (REINFORCE, Williams 1992; Mirhoseini et al., ICML 2017).

    The policy (`meshwise.strategies.search.algorithms.policy`) reads the operator graph and the machine and takes the
    decisions of `meshwise.strategies.search.decisions` one after another; a decision that is illegal or leads only to
    visited plans cannot be drawn [3]_. For each update ``batch`` plans are drawn, and of those that may be faster than
    the best so far the ``evaluations`` with the lowest bounds are evaluated. The cost of a plan is the square root of
    its step time [2]_ over that of the first plan that fits, in the order in which an expert would try them. A bound
    stands in for an unknown step time, and a plan that does not fit has a fixed cost. The policy learns by policy
    gradient [1]_ from the plans whose cost is below a moving average of the quantile ``risk`` of batches [5]_, with an
    entropy bonus [4]_. The search ends when every plan was evaluated, does not fit or cannot be faster than the best,
    which is then proven.

    Differences from [2]_: the policy scores grouped decisions instead of a device per operator, only promising plans
    are measured, and the baseline is a quantile instead of the mean, because the best plan is wanted and it is close to
    many that do not fit.

    Parameters
    ----------
    memory
        Weight of the old moving average in the new one.
    """

    name: ClassVar[str] = "reinforcement"
    most_plans: ClassVar[int] = MOST_LISTED

    seed: int = 0
    batch: int = 32
    evaluations: int = 2
    learning_rate: float = 0.01
    entropy: float = 0.01
    memory: float = 0.9
    risk: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.evaluations <= self.batch:
            raise ValueError(
                f"reinforcement: evaluations are at least 1 and at most batch, met {self.evaluations} and {self.batch}"
            )
        if not self.learning_rate > 0 or not self.entropy >= 0:
            raise ValueError(
                "reinforcement: learning_rate is more than 0 and entropy at least 0, "
                f"met {self.learning_rate} and {self.entropy}"
            )
        if not 0 <= self.memory < 1 or not 0 < self.risk <= 1:
            raise ValueError(
                "reinforcement: memory is at least 0 and below 1, and risk above 0 and at most 1, "
                f"met {self.memory} and {self.risk}"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the most promising plans of every batch; return a proof once all plans were visited.

        Raises
        ------
        ValueError
            Where torch is not installed.
        """
        if find_spec("torch") is None:
            raise ValueError("reinforcement: it needs torch, which is not installed; pip install 'meshwise[exec]'")
        import torch

        from meshwise.strategies.search.algorithms.policy import Policy, draw, one_thread

        with one_thread():
            outlooks, tree = Outlooks(problem, costs), DecisionTree(problem, space)
            first_layout = next((layout for layout in tree.list_by_habit() if outlooks[layout].fits), None)
            if first_layout is None:
                return Proof(inf)
            expert_time = best_time = (yield complete(problem, first_layout)).step_time
            times = {first_layout: expert_time}
            policy = Policy(problem, torch.Generator().manual_seed(self.seed), self.learning_rate)
            baseline: float | None = None
            while not tree.is_closed(tree.root):
                walks = draw(policy, tree, self.batch)
                drawn_layouts = [end.layouts[0] for end in walks.ends]
                new_layouts = dict.fromkeys(candidate for candidate in drawn_layouts if candidate not in times)
                for layout in sorted(new_layouts, key=lambda candidate: outlooks[candidate].bound)[: self.evaluations]:
                    if outlooks[layout].bound < best_time:
                        times[layout] = (yield complete(problem, layout)).step_time
                        best_time = min(best_time, times[layout])
                for layout in drawn_layouts:
                    if layout in times or outlooks[layout].bound >= best_time:
                        tree.close_layout(layout)
                cost_ratios = [
                    min(times.get(candidate, outlooks[candidate].bound) / expert_time, OUT_OF_MEMORY)
                    for candidate in drawn_layouts
                ]
                cost = torch.tensor([sqrt(candidate) for candidate in cost_ratios])
                good_cost = float(cost.quantile(self.risk))
                baseline = good_cost if baseline is None else baseline
                advantage = ((baseline - cost) / (cost.std(correction=0) + 1e-6)).clamp(min=0)
                policy.learn(-(advantage * walks.log_probability + self.entropy * walks.entropy).mean())
                baseline = self.memory * baseline + (1 - self.memory) * good_cost
            return Proof(best_time)
