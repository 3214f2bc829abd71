"""A machine fitted to runs: known factors are found again, and later predictions are shifted and surer."""

from dataclasses import replace

import numpy as np
import pytest

from meshwise.scenarios.inputs.cluster_file import load_cluster, write_cluster
from meshwise.scenarios.intervals import find_uncertainty, step_time_interval
from meshwise.scenarios.machine_fit.posterior import Prior, load_prior
from meshwise.scenarios.machine_fit.run_fit import fit_runs, move_run
from meshwise.scenarios.published.accuracy import predict
from meshwise.scenarios.published.runs import build_run
from meshwise.simulator.machine.factors import FACTORS, Factors

from .small_runs import ROW, RUNS, measure

DAY = "2026-11-28"
TRUTH = Factors(compute=1.3, memory=0.8, host=1.5, intra_rate=1.4, inter_rate=1.6)
WIDE = Prior((0.0,) * len(FACTORS), (0.5,) * len(FACTORS), 0.01)


def test_known_factors_are_found_where_steps_depend_on_them() -> None:
    fit = fit_runs([measure(row, TRUTH) for row in RUNS], WIDE, DAY)
    assert all(run.after == pytest.approx(run.measured, rel=0.02) for run in fit.runs)
    assert max(abs(run.before / run.measured - 1) for run in fit.runs) > 0.1
    # a factor on all parts is no other than the whole step's: what runs can tell are the parts' own times that
    sums = np.eye(len(FACTORS))[:-1] + np.eye(len(FACTORS))[-1]
    deviations = np.sqrt(np.einsum("ij,jk,ik->i", sums, fit.posterior.covariance, sums))
    errors = sums @ (fit.posterior.means - TRUTH.logarithms)
    assert (np.abs(errors) < 3 * deviations + 0.02).all()
    told = [name for name, deviation in zip(FACTORS, deviations, strict=False) if deviation < 0.15]
    assert {"compute", "inter_rate"} <= set(told)


def test_a_run_apart_is_predicted_better_and_its_interval_holds_it() -> None:
    measured = [measure(row, TRUTH) for row in RUNS]
    fit = fit_runs(measured[:-1], load_prior(), DAY)
    assert fit.cluster.calibration is not None
    before, after = predict(measured[-1]), predict(move_run(measured[-1], fit.cluster.calibration))
    assert before.error is not None and after.error is not None
    assert abs(after.error) < abs(before.error)
    low, high = after.step_time_interval or (0.0, 0.0)
    assert low < (measured[-1].step_time or 0) < high
    assert "fitted to 5 runs" in after.run.assumed[-1]


def test_intervals_narrow_with_runs_that_agree() -> None:
    measured = [measure(row, TRUTH) for row in RUNS]
    records = [fit_runs(measured[:count], load_prior(), DAY).cluster.calibration for count in (1, 3, 6)]
    widths = [record.find_half_width(0.9) for record in records if record is not None]
    assert len(widths) == 3 and widths == sorted(widths, reverse=True)


def test_the_machine_is_written_and_read_with_its_record(tmp_path) -> None:
    fit = fit_runs([measure(ROW, TRUTH)], load_prior(), DAY)
    write_cluster(fit.cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == fit.cluster
    run = build_run(ROW)
    assert run.scenario is not None
    moved = run.scenario.on(load_cluster(tmp_path / "c.yaml"))
    record = moved.problem.cluster.calibration
    assert record is not None and record.runs == 1
    width = record.find_half_width(0.9)
    assert find_uncertainty(moved.problem).step_time_width == pytest.approx(width)
    result = moved.simulate()
    assert result.step_time_interval == pytest.approx(
        (result.step_time / np.exp(width), result.step_time * np.exp(width))
    )


def test_the_record_alone_predicts_what_the_machine_does() -> None:
    fit = fit_runs([measure(ROW, TRUTH)], load_prior(), DAY)
    run = build_run(ROW)
    assert run.scenario is not None and fit.cluster.calibration is not None
    moved = predict(move_run(run, fit.cluster.calibration))
    same = predict(replace(run, scenario=run.scenario.on(fit.cluster)))
    assert moved.step_time == pytest.approx(same.step_time, rel=1e-4)  # a record rounds factors to six digits
    assert moved.peak_memory == same.peak_memory


def test_runs_that_tell_nothing_are_named() -> None:
    runs = [
        measure(ROW, TRUTH),
        build_run(ROW | {"row_id": "no time", "step_time_s": None}),
        build_run(ROW | {"row_id": "failed", "status": "oom"}),
        build_run({"row_id": "no model", "n_devices": 16}),
    ]
    skipped = dict(fit_runs(runs, load_prior(), DAY).skipped)
    assert skipped["no time"] == "no step time was measured"
    assert skipped["failed"] == "it ran out of memory"
    assert skipped["no model"]
    with pytest.raises(ValueError, match="at least one measured step, met none in 3 runs: no time: no step time"):
        fit_runs(runs[1:], load_prior(), DAY)
    with pytest.raises(ValueError, match="at most 100 runs, met 101"):
        fit_runs(runs[:1] * 101, load_prior(), DAY)


def test_an_unfitted_interval_is_that_of_its_category() -> None:
    run = build_run(ROW)
    assert run.scenario is not None and run.scenario.problem.cluster.calibration is None
    prediction = predict(run)
    assert prediction.step_time is not None
    assert prediction.step_time_interval == step_time_interval(prediction.step_time, "plan stated")  # type: ignore[arg-type]
