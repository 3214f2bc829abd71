"""The model that one device trains is the one that the simulator counts, and its optimizer is AdamW."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.calibration.device_machine import Machine  # noqa: E402
from meshwise.executor.calibration.device_training import (  # noqa: E402
    MainWeights,
    build_network,
    build_trials,
    count_states,
    list_candidates,
    measure_training,
    split_buckets,
)
from meshwise.executor.model.network import compute_rotation, initialize, rotate_heads  # noqa: E402
from meshwise.executor.recording.timer import Timer  # noqa: E402
from meshwise.scenarios.published.runs import build_run  # noqa: E402
from meshwise.simulator.models.presets import PRESETS  # noqa: E402

SPECS = [run.spec for run in build_trials()]
H200 = Machine("H200 SXM", "NVLink4/NVSwitch", 8, 1.5e11, "box", 1e12, 64, "torch 2.13", "2026-01-02")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("sequence", [4, 16])
def test_parameters_are_those_of_the_operator_graph(spec, sequence: int) -> None:
    found = sum(parameter.numel() for parameter in build_network(spec, sequence).parameters())
    assert found == spec.graph(sequence, "bf16").num_parameters


@pytest.mark.parametrize("name", [run.spec.name for run in list_candidates()])
def test_parameters_of_presets_are_those_of_the_operator_graph(name: str) -> None:
    with torch.device("meta"):
        found = sum(parameter.numel() for parameter in build_network(PRESETS[name], 2048).parameters())
    assert found == PRESETS[name].graph(2048, "bf16").num_parameters


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_token_sees_itself_and_those_before(spec) -> None:
    model, tokens = build_network(spec, 8), torch.arange(8)[None]
    initialize(model, 0)
    changed = tokens.clone()
    changed[0, 5] = 40
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:5], after[:5])
    assert all((before[place] - after[place]).abs().max() > 1e-6 for place in (5, 7))


def test_rotary_products_depend_on_distance_alone() -> None:
    query, key = torch.randn(2, 8)
    query_at, key_at = (torch.stack([each] * 12)[None] for each in (query, key))
    turn = compute_rotation(torch.arange(12), query)
    turned = (rotate_heads(query_at, turn) @ rotate_heads(key_at, turn).mT)[0]
    torch.testing.assert_close(turned[2:, 2:], turned[:-2, :-2])
    torch.testing.assert_close(turned.diagonal(), (query @ key).expand(12))


def test_main_weights_step_as_adamw_in_fp32() -> None:
    shapes = ((3, 4), (5,), (2, 2))
    narrow = [torch.nn.Parameter(torch.randn(shape).bfloat16() * 1e-3) for shape in shapes]  # a step is 1e-4
    wide = [torch.nn.Parameter(parameter.detach().float()) for parameter in narrow]
    one, other = MainWeights(narrow), torch.optim.AdamW(wide, lr=1e-4)
    for _ in range(3):
        for parameter, main in zip(narrow, wide, strict=True):
            parameter.grad = torch.randn_like(parameter)
            main.grad = parameter.grad.float()
        one.step()
        other.step()
        assert all(parameter.grad is None for parameter in narrow)
    for parameter, main in zip(narrow, wide, strict=True):
        torch.testing.assert_close(parameter, main.bfloat16())


def test_buckets_keep_the_order_and_the_limit() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 3, 3, 20, 1)]
    assert [[p.numel() for p in bucket] for bucket in split_buckets(parameters, 6)] == [[3, 3], [3], [20], [1]]


def test_rows_of_training_are_read_as_the_runs_that_they_are() -> None:
    told: list[str] = []
    rows = list(measure_training(build_trials(), H200, Timer(), told.append, lambda *_: None))
    assert told == ["training steps of trial-gpt", "training steps of trial-llama"]
    for row, run in zip(rows, build_trials(), strict=True):
        found = build_run(row, "here")
        assert found.scenario is not None, found.skipped
        assert found.step_time == row["step_time_s"] > 0
        problem = found.scenario.problem
        assert problem.graph.num_parameters == run.spec.graph(run.sequence, "bf16").num_parameters
        assert (problem.training.global_batch, problem.cluster.num_devices) == (run.microbatch, 1)
        # bf16 weights and gradients, fp32 main weights and two moments: 16 bytes
        kept = problem.training
        assert kept.parameter_bytes + kept.gradient_bytes + kept.optimizer_bytes == 16


def test_models_whose_states_do_not_fit_are_left_out_and_the_others_counted() -> None:
    skipped: list[str] = []
    small, large = build_trials()
    machine = replace(H200, memory=count_states(small.spec) + 1)
    assert count_states(small.spec) == 16 * small.spec.graph(1, "bf16").num_parameters < count_states(large.spec)
    runs = [large, small, small, small]
    rows = list(
        measure_training(runs, machine, Timer(), lambda _: None, lambda *why: skipped.append(why[0]), max_rows=2)
    )
    assert [row["model"] for row in rows] == ["trial-gpt"] * 2
    assert skipped == ["training of trial-llama"]


def test_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("meshwise.executor.calibration.device_training.MainWeights", full)
    (row,) = measure_training(build_trials()[:1], H200, Timer(), lambda _: None, lambda *_: None)
    assert build_run(row, "here").status == "oom" and "step_time_s" not in row


def test_ten_models_of_the_project_are_tried() -> None:
    assert len(list_candidates()) == 10
    sizes = [count_states(run.spec) for run in list_candidates()]
    assert sizes == sorted(sizes)
