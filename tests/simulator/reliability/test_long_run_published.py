"""Published long runs: what follows from their figures, and what does not."""

import json
from importlib.resources import files
from math import sqrt

import pytest

from meshwise.simulator.reliability.failures import (
    FailureKind,
    failure_model,
    failure_model_names,
    failure_model_source,
)
from meshwise.simulator.reliability.goodput import best_interval, goodput
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery
from meshwise.simulator.units import Dimension, parse

from .reference import expected_goodput, recovery_time

DAY = 86400.0


SECTIONS = json.loads((files("meshwise.simulator") / "catalog" / "failures.json").read_text("utf-8"))


def value(name: str) -> float:
    figure = SECTIONS["figures"][name]["value"]
    return parse(figure, Dimension.TIME) if isinstance(figure, str) else float(figure)


def test_every_record_has_a_source_and_was_read_quoted_or_derived() -> None:
    records = [record for section in SECTIONS.values() for record in section.values()]
    assert len(records) > 20
    for record in records:
        assert record["status"] in ("read", "secondary", "derived")
        assert record["source"]
    for name in failure_model_names():
        assert failure_model(name).name == name
        assert failure_model_source(name)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"failure model is one of meta-llama3, .* met meta-llama4"):
        failure_model("meta-llama4")


# Llama 3 405B: 16,384 H100, 54 days, 466 interruptions, 419 of them unexpected, more than 90 % effective training time.
# The failure rate is the published count over the published period. The paper states neither checkpoint interval nor
# recovery time: checkpoint figures are ByteCheckpoint's for another 405B model on 8,960 GPUs, detection and
# initialisation MegaScale's upper bounds. Step time, interval, repair time and spares are assumed; spares are ample.


def llama3(interval: float) -> LongRun:
    blocking, save, load = (value(f"bytecheckpoint-405b.{name}") for name in ("blocking", "save", "load"))
    recovery = Recovery(value("megascale.detection"), value("megascale.initialisation"), repair=DAY)
    checkpoint = Checkpoint(interval, blocking, save, load)
    return LongRun(5.0, 16384, 2048, failure_model("meta-llama3"), checkpoint, recovery, duration=54 * DAY, spares=64)


def test_llama_3_is_interrupted_as_often_as_published() -> None:
    result = goodput(llama3(300.0), runs=24)
    planned = result.interruptions(FailureKind.PLANNED)
    total, unexpected = value("meta-llama3.interruptions"), value("meta-llama3.unexpected")
    # Poisson counts, 24 runs: 4 standard errors of sqrt(count / 24)
    assert result.interruptions() == pytest.approx(total, abs=4 * sqrt(total / 24))
    assert result.interruptions() - planned == pytest.approx(unexpected, abs=4 * sqrt(unexpected / 24))
    assert llama3(300.0).mtbf / 3600 == pytest.approx(54 * 24 / 466)


def test_llama_3_trains_effectively_as_published_only_with_frequent_checkpoints() -> None:
    published = value("meta-llama3.effective_training_time")
    # above 90 % over 466 interruptions leaves less than 0.1 * 54 * 24 * 60 / 466 = 16.7 min for each. Recovery takes
    # 10 + 0.5 + 2.2 = 12.7 min of that, so that no more than 4 min of training may be lost each time.
    allowed = (1 - published) * 54 * DAY / 466
    assert allowed / 60 == pytest.approx(16.7, abs=0.05)
    assert recovery_time(llama3(300.0)) / 60 == pytest.approx(12.66, abs=0.01)
    best = best_interval(llama3(300.0), runs=4)
    assert published < expected_goodput(llama3(300.0)) < expected_goodput(llama3(best.interval)) < 0.93
    assert best.goodput.mean == pytest.approx(expected_goodput(best.goodput.run), abs=4 * best.goodput.standard_error)
    # the hourly interval typical of Meta's research clusters would lose half an hour each time: 76.6 %
    assert expected_goodput(llama3(value("meta-rsc.checkpoint_interval"))) == pytest.approx(0.766, abs=0.001)


# Research clusters: E[ETTR] = (1 - N r (u0 + dt / 2)) / (1 + w / dt), N nodes, r failures a node and day.


def research_cluster(nodes: int) -> LongRun:
    write, restart = value("meta-rsc.checkpoint_write"), value("meta-rsc.restart")
    checkpoint = Checkpoint(value("meta-rsc.checkpoint_interval"), write, write, 0.0)
    recovery = Recovery(0.0, restart, repair=0.0)
    model = failure_model("meta-rsc1")
    return LongRun(10.0, 8 * nodes, nodes, model, checkpoint, recovery, duration=100_000 * DAY / nodes)


def published_ettr(nodes: int) -> float:
    restart, interval, write = (
        value(f"meta-rsc.{name}") for name in ("restart", "checkpoint_interval", "checkpoint_write")
    )
    rate = 6.5 / 1000 / DAY
    return (1 - nodes * rate * (restart + interval / 2)) / (1 + write / interval)


@pytest.mark.parametrize("nodes", [128, 256, 512, 1024])
def test_small_losses_are_those_of_the_published_formula(nodes: int) -> None:
    run = research_cluster(nodes)
    result = goodput(run, runs=32)
    assert 4 * result.standard_error < 0.01
    assert result.mean == pytest.approx(published_ettr(nodes), abs=0.01)


def test_large_losses_are_less_than_the_published_formula_says() -> None:
    # Exact: w / (w + b) * x / (exp(x) - 1) * exp(-y), x = rate (w + b), y = rate u0: work w, write b. Expanded:
    # w / (w + b) * (1 - x / 2 + x^2 / 12) * (1 - y + y^2 / 2). The formula has 1 - y - x / 2 + rate b / 2 for the last
    # two factors, so that it lacks x^2 / 12 + x y / 2 + y^2 / 2 - rate b / 2. At 2048 nodes, x = 0.601 and y = 0.046:
    # 0.030 + 0.014 + 0.001 - 0.023 = 0.022, times 3600 / 3900: 2 points.
    run = research_cluster(2048)
    result = goodput(run, runs=32)
    assert published_ettr(2048) == pytest.approx(0.6244, abs=1e-4)
    x, y, half_write = 3900 / run.mtbf, 300 / run.mtbf, 150 / run.mtbf
    lacking = (x**2 / 12 + x * y / 2 + y**2 / 2 - half_write) * 3600 / 3900
    assert lacking == pytest.approx(0.020, abs=0.0005)
    assert expected_goodput(run) - published_ettr(2048) == pytest.approx(lacking, abs=0.002)
    assert result.mean == pytest.approx(expected_goodput(run), abs=4 * result.standard_error)
    assert result.mean > published_ettr(2048) + 0.01


def test_the_published_time_between_failures_follows_from_the_rate_of_a_node() -> None:
    # 24 h / (2048 * 6.5 / 1000) = 1.803 h
    assert failure_model("meta-rsc1").mtbf(16384, 2048) == pytest.approx(value("meta-rsc1.mtbf_16384"), rel=0.005)


def test_bloom_spends_the_published_share_of_its_time_on_checkpoints() -> None:
    # steps of 108 s: 100 of them make the 3 hours. 40 / (3 * 3600 + 40) = 0.37 %; restart time is assumed.
    save = value("bloom-176b.save")
    checkpoint = Checkpoint(value("bloom-176b.checkpoint_interval"), save, save, 0.0)
    recovery = Recovery(0.0, 600.0, repair=7 * DAY)
    run = LongRun(108.0, 384, 48, failure_model("bloom-176b"), checkpoint, recovery, duration=90 * DAY, spares=4)
    result = goodput(run, runs=8)
    share = result.average("checkpointing") / result.average("wall_time")
    assert share == pytest.approx(value("bloom-176b.checkpoint_overhead"), abs=0.0001)
    assert result.average("checkpoints") == pytest.approx(720, rel=0.03)


def test_machines_alone_do_not_explain_the_goodput_of_opt() -> None:
    # Assumed: checkpoints every hour, 1 min; 30 min to notice and restart; 2 days of repair, or 4 h for another
    # machine; 4 spares. The published 33 of 56 days also hold loss divergence, holidays and a deleted cluster.
    recovery = Recovery(600.0, 1200.0, repair=2 * DAY, replacement=4 * 3600.0)
    checkpoint = Checkpoint(3600.0, 60.0, 60.0, 60.0)
    wall = value("opt-175b.wall_time")
    run = LongRun(10.0, 1024, 128, failure_model("opt-175b"), checkpoint, recovery, duration=wall, spares=4)
    result = goodput(run, runs=8)
    assert result.interruptions() == pytest.approx(2 * 56, abs=4 * sqrt(112 / 8))
    assert result.interruptions() > value("opt-175b.restarts")
    assert result.mean > value("opt-175b.undisturbed") / wall + 0.1
