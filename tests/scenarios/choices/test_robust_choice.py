"""The plan that is best at a quantile, where the best plan cuts operators apart."""

from meshwise.scenarios.choices.robust_choice import choose_robust
from meshwise.scenarios.loader import load
from meshwise.strategies.operators.operator_plan import cuts_operators


def test_a_plan_that_cuts_operators_is_weighed_beside_uniform_ones() -> None:
    scenario = load("operators/mlp")
    trials = scenario.search_plan("frontier").trials
    own = next(trial for trial in trials if trial.evaluation.fits and cuts_operators(scenario.problem, trial.plan))
    choice = choose_robust(scenario, 0.95, 0.05, plan=own.plan)
    prospects = {prospect.trial.plan: prospect for prospect in choice.ranked_prospects}
    assert prospects[own.plan].trial.evaluation == own.evaluation
    allowed = [prospect.quantile for prospect in prospects.values() if prospect.is_allowed]
    assert choice.best_prospect is not None and choice.best_prospect.quantile == min(allowed)
