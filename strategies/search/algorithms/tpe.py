"""A tree-structured Parzen estimator of the decisions of fast plans. Needs optuna.

References
----------
.. [1] Bergstra, Bardenet, Bengio, Kegl, "Algorithms for hyper-parameter optimization", NIPS 2011, section 4.
.. [2] Watanabe, "Tree-structured Parzen estimator: understanding its algorithm components and their roles for better
   empirical performance", 2023 (arXiv 2304.11127): categorical decisions.
.. [3] Akiba et al., "Optuna: a next-generation hyperparameter optimization framework", KDD 2019: define-by-run, and
   ``TPESampler``, which ranks trials that break a constraint behind all others, by how far.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import log
from typing import TYPE_CHECKING, ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.decisions import DecisionTree, Outlooks, PartialPlan
from meshwise.strategies.search.proposals import Proposals
from meshwise.strategies.search.space import MOST_LISTED, Space

if TYPE_CHECKING:
    from optuna.trial import Trial


@dataclass(frozen=True, slots=True)
class TPE:
    """Draws of the decisions that fast plans have more often than others (Bergstra et al., NIPS 2011).

    A plan is drawn by a walk through the tree of `meshwise.strategies.search.decisions` from its root to a layout.
    Every decision is a categorical parameter, named by its fields and the values that are open there, so that partial
    plans with the same choice before them share what is learnt. After ``startup`` draws at random, a value is drawn by
    two densities: how often the best plans have it, and how often all others; of ``candidates`` draws from the first
    the one with the largest ratio is taken [1]_ [2]_. The densities and the draws are those of optuna's ``TPESampler``
    [3]_, jointly for decisions that every plan takes.

    The objective is the logarithm of the step time. A plan that does not fit is not evaluated; it breaks a constraint
    by the fraction of its memory that is missing. A plan once drawn is left out of the tree, so that none is drawn
    twice and the search ends when all were.

    Differences from [1]_: all parameters are categories, and plans that do not fit rank behind all others.

    Parameters
    ----------
    startup
        Plans drawn at random before the densities are used, those that do not fit included.
    candidates
        Draws of which the one with the largest ratio is taken.
    """

    name: ClassVar[str] = "tpe"
    most_plans: ClassVar[int] = MOST_LISTED

    seed: int = 0
    startup: int = 10
    candidates: int = 24

    def __post_init__(self) -> None:
        if self.startup < 1 or self.candidates < 1:
            raise ValueError(
                f"tpe: startup and candidates are at least 1, met {self.startup} and {self.candidates}; nearest: 1"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the drawn plans that fit; prove nothing.

        Raises
        ------
        ValueError
            Where optuna is not installed.
        """
        if find_spec("optuna") is None:
            raise ValueError("tpe: it needs optuna, which is not installed; pip install 'meshwise[tpe]'")
        from optuna import create_study
        from optuna.samplers import TPESampler

        with quiet_logging():
            sampler = TPESampler(
                n_startup_trials=self.startup, n_ei_candidates=self.candidates, seed=self.seed, constant_liar=False
            )
            study = create_study(sampler=sampler)
            outlooks, tree, names = Outlooks(problem, costs), DecisionTree(problem, space), ParameterNames()
            while not tree.is_closed(tree.root):
                trial = study.ask()
                layout = draw_layout(trial, tree, names)
                tree.close_layout(layout)
                fits, shortfall = outlooks[layout].fits, outlooks[layout].shortfall
                trial.set_constraint("memory", 0.0 if fits else 1 + shortfall)  # more than 0: it does not fit
                study.tell(trial, log((yield complete(problem, layout)).step_time) if fits else 0.0)
        return None


class ParameterNames(dict[tuple[tuple[str, ...], tuple[object, ...]], str]):
    """Names of parameters by the fields of a decision and its values, numbered as they are met."""

    def __missing__(self, choice: tuple[tuple[str, ...], tuple[object, ...]]) -> str:
        self[choice] = f"{' '.join(choice[0])} {len(self)}"
        return self[choice]


def draw_layout(trial: "Trial", tree: DecisionTree, names: ParameterNames) -> Layout:
    """Return the layout that a trial of optuna draws, one categorical parameter a decision, from the root of a tree."""
    partial: PartialPlan = tree.root
    while partial.layout is None:
        branches = tree.list_branches(partial)
        branches = tuple(branch for branch in branches if branch.fields == branches[0].fields)
        choice = branches[0].fields, tuple(branch.values for branch in branches)
        index = trial.suggest_categorical(names[choice], range(len(branches)))
        partial = branches[index].child
    return partial.layout


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Let optuna log errors alone, and leave it afterwards as it was."""
    from optuna import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
