"""Monte Carlo tree search over partial plans.

References
----------
.. [1] Kocsis, Szepesvari, "Bandit based Monte-Carlo planning", ECML 2006: UCT.
.. [2] Couetoux et al., "Continuous upper confidence trees", LION 2011: progressive widening.
.. [3] Childs, Brodeur, Kocsis, "Transpositions and move groups in Monte Carlo tree search",
   IEEE CIG 2008: equal states are one node, whose value all ways to it share.
.. [4] Alabed et al., "Automatic discovery of composite SPMD partitioning strategies in PartIR", 2022
   (arXiv 2210.06352), and "TOAST: fast and scalable auto-partitioning based on principled static
   analysis", 2025 (arXiv 2508.15010): tree search over grouped sharding decisions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, log, sqrt
from random import Random
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.decisions import DecisionTree, Outlooks, PartialPlan
from meshwise.strategies.search.proposals import Proof, Proposals
from meshwise.strategies.search.space import MOST_LISTED, Space


@dataclass(slots=True)
class Arm:
    """What has been learnt about a partial plan: how often it led to a plan that fits, and the best reward."""

    visits: int
    best_reward: float

    def value(self, exploration: float, num_tries: int) -> float:
        """Return the best reward with the confidence term of UCB1 ([1]_, section 2.1).

        ``num_tries`` is how often this arm or one of its siblings was chosen.

        >>> Arm(visits=4, best_reward=0.5).value(exploration=0.0, num_tries=16)
        0.5
        """
        return self.best_reward + exploration * sqrt(log(num_tries) / self.visits)


@dataclass(frozen=True, slots=True)
class MCTS:
    """Tree search that learns which decisions lead to fast plans (UCT, Kocsis and Szepesvari 2006).

    The tree is that of `meshwise.strategies.search.decisions`, in which partial plans that leave the same layouts open
    are one node [3]_. From the root the search follows the branch with the highest upper confidence bound [1]_, until
    a node has fewer tried branches than its visits to the power ``widening`` [2]_. From there it draws ``rollouts``
    plans, one random decision after another, and evaluates one of them, drawn in proportion to
    ``bound**(-1 / temperature)``. Decisions are grouped, as in [4]_.

    The reward of a plan is the step time of the first plan that fits, in the order in which an expert would try them,
    over its own. A plan that cannot be faster than the best so far is not evaluated and has its bound as step time. A
    plan that does not fit is not evaluated either; its reward is minus the fraction of its memory that is missing. A
    plan is visited once, and a node whose plans have all been visited is never entered again; once that is the root,
    the best plan is proven.

    Differences from [1]_: the value of a branch is its best reward instead of the mean, because one plan is wanted and
    rewards are not random; the best plans are close to many plans that do not fit, which count only until one fits.

    Parameters
    ----------
    exploration
        Weight of the confidence term against the best reward.
    """

    name: ClassVar[str] = "mcts"
    most_plans: ClassVar[int] = MOST_LISTED

    seed: int = 0
    exploration: float = 0.2
    widening: float = 0.5
    rollouts: int = 16
    temperature: float = 0.02

    def __post_init__(self) -> None:
        if not self.exploration >= 0 or not 0 <= self.widening <= 1:
            raise ValueError(
                f"mcts: exploration is at least 0 and widening from 0 to 1, met {self.exploration} and {self.widening}"
            )
        if self.rollouts < 1 or not self.temperature > 0:
            raise ValueError(
                f"mcts: rollouts is at least 1 and temperature more than 0, met {self.rollouts} and {self.temperature}"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the most promising plan of every visit to the tree; return a proof once all plans were visited."""
        rng, outlooks, tree = Random(self.seed), Outlooks(problem, costs), DecisionTree(problem, space)
        first_layout = next((layout for layout in tree.list_by_habit() if outlooks[layout].fits), None)
        if first_layout is None:
            return Proof(inf)
        expert_time = best_time = (yield complete(problem, first_layout)).step_time
        arms: dict[PartialPlan, Arm] = {}
        while not tree.is_closed(tree.root):
            open_paths: dict[Layout, tuple[PartialPlan, ...]] = {}
            for path in self._roll_out(tree, arms, rng):
                layout = path[-1].layout
                assert layout is not None  # a path ends where everything is decided
                bound, shortfall = outlooks[layout]
                if bound < best_time:
                    open_paths[layout] = path
                elif not tree.is_closed(path[-1]):
                    tree.close_layout(layout)
                    _learn_reward(arms, path, -shortfall if bound == inf else expert_time / bound)
            if open_paths:
                layout = _draw_softmin(
                    list(open_paths), [outlooks[candidate].bound for candidate in open_paths], self.temperature, rng
                )
                # the first plan has been evaluated already; a repeated proposal would count as one
                time = expert_time if layout == first_layout else (yield complete(problem, layout)).step_time
                best_time = min(best_time, time)
                tree.close_layout(layout)
                _learn_reward(arms, open_paths[layout], expert_time / time)
        return Proof(best_time)

    def _roll_out(
        self, tree: DecisionTree, arms: dict[PartialPlan, Arm], rng: Random
    ) -> Iterator[tuple[PartialPlan, ...]]:
        """Yield paths from the root to plans not visited yet: along the best arms, and then at random."""
        known_path = self._select_path(tree, arms)
        for _ in range(self.rollouts):
            if tree.is_closed(known_path[-1]):
                return
            path = list(known_path)
            while branches := tree.list_branches(path[-1]):
                path.append(rng.choice(branches).child)
            yield tuple(path)

    def _select_path(self, tree: DecisionTree, arms: dict[PartialPlan, Arm]) -> list[PartialPlan]:
        """Return the path from the root along the best arms to a node with a branch to try."""
        path = [tree.root]
        while branches := tree.list_branches(path[-1]):
            tried_children = [branch.child for branch in branches if branch.child in arms]
            num_tries = sum(arms[child].visits for child in tried_children)
            if len(tried_children) < min(len(branches), ceil((num_tries + 1) ** self.widening)):
                break
            path.append(max(tried_children, key=lambda child: arms[child].value(self.exploration, num_tries)))
        return path


def _learn_reward(arms: dict[PartialPlan, Arm], path: Sequence[PartialPlan], reward: float) -> None:
    """Give the reward of a plan to every partial plan on its path.

    A negative reward, of a plan that does not fit, counts as a visit only for an arm without visits.
    """
    for partial in path:
        arm = arms.setdefault(partial, Arm(0, reward))
        arm.visits += reward > 0 or not arm.visits
        arm.best_reward = max(arm.best_reward, reward)


def _draw_softmin(layouts: Sequence[Layout], bounds: Sequence[float], temperature: float, rng: Random) -> Layout:
    """Return a layout drawn in proportion to ``bound**(-1 / temperature)``."""
    least_bound = min(bounds)
    return rng.choices(layouts, [(least_bound / bound) ** (1 / temperature) for bound in bounds])[0]
