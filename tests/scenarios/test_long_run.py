"""The ``run`` of a scenario: from YAML to goodput, and what is wrong with it."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from meshwise import load
from meshwise.scenarios.commands.main import run as command
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.long_run import RunSettings, count_hosts
from meshwise.scenarios.schema.scenario import ScenarioTable
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link, Switch
from meshwise.simulator.reliability.failures import Component, FailureKind, Restart, failure_model, failure_model_source
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery

from ..simulator.reliability.reference import expected_goodput

STEP = """\
name: small
model: {transformer: {layers: 2, hidden: 64, heads: 4, ffn: 256, vocab: 256}}
training: {global_batch: 8, sequence: 32, precision: fp32}
cluster: {preset: local-cpu, nodes: 1, devices_per_node: 2}
plan: {data: 2, microbatch: 4}
"""
RUN = """\
run:
  duration: 2 days
  failures: {device_mtbf: 10 h, software_mtbf: 12 h}
  checkpoint: {interval: 30 min, blocking: 20 s, save: 60 s, load: 130 s}
  recovery: {detection: 2 min, restart: 10 min, repair: 24 h}
  spares: 16
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a scenario with each of ``changes`` made to its run, and returns its path."""
    monkeypatch.chdir(tmp_path)

    def to_file(*changes: tuple[str, str], text: str = STEP + RUN) -> str:
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        Path("scenario.yaml").write_text(text)
        return "scenario.yaml"

    return to_file


def settings(path: str) -> RunSettings:
    found = load(path).run
    assert found is not None
    return found


def long_run(path: str) -> LongRun:
    return settings(path).to_long_run(load(path).problem.cluster, (0, 1), step_time=1.0)


def test_a_run_is_read_into_its_values(write) -> None:
    run = long_run(write())
    assert (run.duration, run.steps, run.spares, run.seed) == (2 * 86400, None, 16, 0)
    assert settings("scenario.yaml").table.runs == 8
    assert run.checkpoint == Checkpoint(1800, 20, 60, 130)
    assert run.recovery == Recovery(120, 600, 86400, None)
    device, software = run.failures.rates
    assert (device.kind, device.mtbf, device.component) == (FailureKind.DEVICE, 36000, Component.DEVICE)
    assert (software.mtbf, software.component, software.restart) == (43200, Component.JOB, Restart.IN_PLACE)


def test_a_failure_model_of_the_catalogue_is_named_and_a_checkpoint_without_save_is_synchronous(write) -> None:
    path = write(("{device_mtbf: 10 h, software_mtbf: 12 h}", "meta-rsc1"), (" save: 60 s,", ""))
    assert long_run(path).failures == failure_model("meta-rsc1")
    assert long_run(path).checkpoint.save == long_run(path).checkpoint.blocking
    run = settings(path)
    assert f"run.failures meta-rsc1 has the figures of {failure_model_source('meta-rsc1')}" in run.assumptions
    assert "run.checkpoint.save is that of blocking (default)" in run.assumptions
    assert "run.seed is 0 (default)" in run.assumptions
    assert not any("spares" in line for line in run.assumptions if line.endswith("(default)"))


@pytest.mark.parametrize(
    ("old", "new", "field", "message"),
    [
        ("duration: 2 days", "seed: 1", "run", "one of duration and steps, met neither"),
        ("duration: 2 days", "duration: 2 days\n  steps: 5", "run", "one of duration and steps, met both"),
        ("duration: 2 days", "duration: 2 weeks", "run.duration", "'weeks' is no unit of time"),
        ("{device_mtbf: 10 h, software_mtbf: 12 h}", "meta-lama3", "run.failures", "nearest: meta-llama3"),
        ("{device_mtbf: 10 h, software_mtbf: 12 h}", "{}", "run.failures", "at least one of device_mtbf"),
        ("device_mtbf: 10 h", "device_mtbf: 0 h", "run.failures.device_mtbf", "more than 0"),
        ("interval: 30 min", "interval: often", "run.checkpoint.interval", "holds a time or best"),
        ("interval: 30 min", "interval: 0 s", "run.checkpoint.interval", "more than 0"),
        ("save: 60 s", "save: 6 s", "run.checkpoint", "save(6 s) is at least blocking(20 s)"),
        ("repair: 24 h", "repair: 24", "run.recovery.repair", "a time has a unit"),
        ("spares: 16", "spares: -1", "run.spares", "at least 0, met -1"),
        ("spares: 16", "spare: 16", "run.spare", "nearest: spares"),
        ("spares: 16", "runs: 1", "run.runs", "at least 2"),
    ],
)
def test_what_is_wrong_is_said_at_its_field(old: str, new: str, field: str, message: str, write) -> None:
    with pytest.raises(ScenarioError) as caught:
        load(write((old, new)))
    (fault,) = caught.value.faults
    assert fault.field == field
    assert message in fault.message
    assert fault.line > len(STEP.splitlines())


@pytest.mark.parametrize("change", [("30 min", "best"), ("{device_mtbf: 10 h, software_mtbf: 12 h}", "opt-175b")])
def test_the_json_schema_knows_the_run(change: tuple[str, str]) -> None:
    schema = ScenarioTable.model_json_schema()
    jsonschema.validate(yaml.safe_load(STEP + RUN.replace(*change)), schema)
    for broken in ("interval: often", "interval: 5"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(STEP + RUN.replace("interval: 30 min", broken)), schema)


def test_a_simulation_has_the_goodput_of_its_run_and_nothing_new_without_one(write) -> None:
    plain = load(write(text=STEP)).simulate()
    result = load(write()).simulate()
    assert plain.goodput is None
    assert "goodput" not in plain.to_json()
    document = result.to_json()
    assert set(document) - set(plain.to_json()) == {"goodput"}
    assert result.goodput is not None
    run = result.goodput.run
    assert (run.step_time, run.devices, run.hosts) == (result.step_time, 2, 1)
    # a day: 2 * 24 / 10 + 24 / 12 = 6.8 failures
    assert run.mtbf == pytest.approx(86400 / 6.8)
    assert document["goodput"]["goodput"] == result.goodput.mean
    assert result.goodput.mean == pytest.approx(expected_goodput(run), abs=0.05)
    assert set(result.assumptions) - set(plain.assumptions) == set(settings("scenario.yaml").assumptions)
    json.dumps(document["goodput"])


def test_the_best_interval_is_searched_where_the_scenario_says_so(write) -> None:
    given = settings(write())
    searched = settings(write(("interval: 30 min", "interval: best")))
    cluster = load("scenario.yaml").problem.cluster
    best, own = (run.find_goodput(cluster, (0, 1), step_time=1.0) for run in (searched, given))
    assert searched.table.checkpoint.interval is None
    assert own.run.checkpoint == Checkpoint(1800, 20, 60, 130)
    assert best.mean > own.mean
    assert 200 < best.run.checkpoint.interval < 1800  # Young: sqrt(2 * 20 * 86400 / 6.8) = 713 s


def test_a_plan_that_does_not_fit_has_no_goodput(write) -> None:
    scenario = load(write())
    step = replace(scenario, run=None).simulate()
    run = settings("scenario.yaml")
    assert run.extend_simulation(step, scenario.problem.cluster).goodput is not None
    assert run.extend_simulation(replace(step, fits=False), scenario.problem.cluster).goodput is None


def test_the_hosts_of_a_run_are_those_that_hold_its_devices() -> None:
    def node(devices: int, hosts: int) -> Node:
        accelerator = Accelerator("a", (("bf16", 1e12),), memory=1e9, memory_bandwidth=1e9)
        return Node(accelerator, Host("h", 1e9), devices, Switch(Link(0.0, 1e9)), 1, Link(0.0, 1e9), hosts)

    # two nodes with a host each, then a rack of 8 devices in 4 hosts
    cluster = Cluster("mixed", ((node(4, 1), 2), (node(8, 4), 1)))
    assert count_hosts(cluster, range(16)) == 2 + 4
    assert count_hosts(cluster, range(5)) == 2
    assert count_hosts(cluster, (3, 8, 9, 15)) == 1 + 2


def test_the_command_prints_goodput_in_two_lines_and_draws_it(write, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["simulate", write(), "--goodput", "goodput.png"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("goodput")]
    assert "over 2 days, checkpoint every 30 min" in line
    assert "interruptions: " in out.splitlines()[-1]
    assert Path("goodput.png").stat().st_size > 20_000
    assert command(["simulate", "scenario.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert 0 < document["goodput"]["goodput"] < 1
    assert command(["simulate", write(text=STEP), "--goodput", "goodput.png"]) == 2
    assert "run: a picture of goodput needs a run" in capsys.readouterr().err


def test_a_run_that_cannot_progress_is_bad_input(
    write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.simulator.reliability.job.MAX_INTERRUPTIONS", 1000)
    change = ("{device_mtbf: 10 h, software_mtbf: 12 h}", "{software_mtbf: 1 ms}")
    assert command(["simulate", write(change)]) == 2
    assert "a run has at most 1000 interruptions" in capsys.readouterr().err
