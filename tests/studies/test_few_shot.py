"""Errors after a few runs: seeded, of the runs that were not drawn, and smaller with more runs."""

import numpy as np
import pytest

from .factor_priors import fit_priors
from .few_shot import HEAD, few_shot_errors, judge_publishers, list_lines, main
from .test_factor_priors import draw_publisher, draw_publishers


def test_a_slow_machine_is_known_after_a_few_of_its_runs() -> None:
    publishers = draw_publishers(0.0, 0.15, 8)
    prior = fit_priors(publishers)
    slow = draw_publisher(np.random.default_rng(2), np.array([0.0] * 7 + [0.4]), count=20)
    errors = [few_shot_errors(slow, count, prior=prior) for count in (0, 1, 5)]
    assert errors[0].mape == pytest.approx(1 - np.exp(-0.4), abs=0.08)
    assert errors[2].mape < errors[1].mape < errors[0].mape
    assert errors[2].mape < 0.06 and errors[2].inside > 0.75
    assert errors[2].half_width < errors[1].half_width < errors[0].half_width


def test_draws_are_those_of_their_seed() -> None:
    publishers = draw_publishers(0.0, 0.15, 3)
    rows, prior = publishers["publisher 0"], fit_priors(publishers)
    assert few_shot_errors(rows, 3, seed=1, prior=prior) == few_shot_errors(rows, 3, seed=1, prior=prior)
    assert few_shot_errors(rows, 3, seed=1, prior=prior) != few_shot_errors(rows, 3, seed=2, prior=prior)
    with pytest.raises(ValueError, match="12 runs are drawn of more than that, met 12"):
        few_shot_errors(rows, 12, prior=prior)


def test_publishers_are_judged_by_a_prior_without_them() -> None:
    publishers = draw_publishers(0.0, 0.15, 3) | {"few": draw_publishers(0.0, 0.1, 1)["publisher 0"][:9]}
    judged = judge_publishers(publishers)
    assert set(judged) == {"publisher 0", "publisher 1", "publisher 2"}
    alone = few_shot_errors(publishers["publisher 1"], 5, prior=fit_priors(publishers, excluding={"publisher 1"}))
    assert judged["publisher 1"][5] == alone
    lines = list(list_lines(publishers))
    assert [line[0] for line in lines] == [*judged, "median"]
    assert {len(line) for line in lines} == {len(HEAD)}


def test_a_file_is_needed(capsys) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
