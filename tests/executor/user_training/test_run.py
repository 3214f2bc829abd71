"""A user's file under every layout is what a plain loop of torch on the whole batch is, or is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from host_pairs import require_namespaces, run_two_hosts

from meshwise.executor.launch.launcher import ExecutionError
from meshwise.executor.launch.several_hosts import Hosts, Rendezvous
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.recording.weight_files import read_weights
from meshwise.executor.user_training.job import TrainJob, metrics_file
from meshwise.executor.user_training.run import TrainRun, collect_training, prepare_training, train
from meshwise.strategies.plan.offloading import offloading
from meshwise.strategies.plan.recomputation import Recompute, parse_words

ZOO = Path(__file__).parent / "zoo.py"
FULL = Recompute.FULL
OFFLOAD = offloading(["optimizer", "activations"])


def run(
    kind: str,
    layout: ModuleLayout,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    verify: bool = True,
    **changes: object,
) -> TrainRun:
    monkeypatch.setenv("KIND", kind)
    job = replace(TrainJob(str(ZOO), layout, steps=2), **changes)  # type: ignore[arg-type]
    return train(job, folder, verify=verify)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("convolutions", ModuleLayout(2)),
        ("convolutions", ModuleLayout(2, zero=3)),
        ("residual", ModuleLayout(2, zero=3, recompute=FULL)),
        ("residual", ModuleLayout(1, recompute=parse_words("selective"))),
        ("recurrent", ModuleLayout(2, zero=2, num_microbatches=2)),
        ("routed", ModuleLayout(2)),
        ("routed", ModuleLayout(2, zero=3, num_microbatches=2)),
        ("weighted", ModuleLayout(2, num_microbatches=2)),
        ("weighted", ModuleLayout(2, zero=1, num_microbatches=4)),
        ("tied", ModuleLayout(2, zero=3, recompute=FULL)),
        ("tied", ModuleLayout(2, zero=3, recompute=parse_words("selective:2"))),
        ("tied", ModuleLayout(2, zero=2, num_microbatches=2, recompute=parse_words("2"))),
        ("tied", ModuleLayout(4, zero=3, zero_shards=2, num_microbatches=2)),
        ("tied", ModuleLayout(2, zero=3, reshard_after_forward=False, num_microbatches=2)),
        ("tied", ModuleLayout(2, num_microbatches=2, recompute=parse_words("1"))),
        ("tied", ModuleLayout(2, num_microbatches=2, recompute=parse_words("1"), offload=OFFLOAD)),
        ("tied", ModuleLayout(2, zero=3, offload=OFFLOAD)),
        ("spectral", ModuleLayout(2, zero=3)),
        ("warm", ModuleLayout(2, zero=3, num_microbatches=2)),
        ("warm", ModuleLayout(4, zero=2, zero_shards=2)),
        ("warm", ModuleLayout(2, zero=3, pipeline=2, num_microbatches=2)),
        ("physical", ModuleLayout(2, zero=3, num_microbatches=2)),
        ("averaged together", ModuleLayout(2, zero=2)),
    ],
)
def test_ranks_compute_what_one_process_does(
    kind: str, layout: ModuleLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(kind, layout, tmp_path, monkeypatch, max_norm=0.01 if kind == "warm" else None)
    assert result.difference is not None and result.difference.is_equal
    assert len(result.losses) == 2 and result.losses[0] != result.losses[1]


@pytest.mark.parametrize(
    ("kind", "layout", "text"),
    [
        ("token mean", ModuleLayout(2), "a loss is a mean over samples"),
        ("contrastive", ModuleLayout(1, num_microbatches=2), "a loss is a mean over samples"),
        ("convolutions", ModuleLayout(1, num_microbatches=2), r"first_norm \(BatchNorm2d\) takes statistics"),
        ("averaged", ModuleLayout(2), "met average, which each rank makes of its own samples; nearest: data=1"),
        ("averaged", ModuleLayout(1, num_microbatches=2), "which each microbatch renews; nearest: num_microbatches=1"),
        ("outputs", ModuleLayout(1), "a scalar loss or a pair"),
        ("spectral", ModuleLayout(3), "divide the samples of a step, met 8; nearest: 6"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    kind: str, layout: ModuleLayout, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=text):
        run(kind, layout, tmp_path, monkeypatch, verify=False)


def test_ranks_with_different_numbers_of_samples_are_refused(tmp_path: Path) -> None:
    job = TrainJob(str(ZOO.with_name("uneven.py")), ModuleLayout(2), steps=1)
    with pytest.raises(UserError, match="equally many samples for a mean over samples, met 2 to 6"):
        train(job, tmp_path)


def test_a_token_mean_in_one_part_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("token mean", ModuleLayout(1), tmp_path, monkeypatch)
    assert result.difference is not None and result.difference.is_equal


def test_a_run_goes_on_under_another_layout_as_if_it_had_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"verify": False, "precision": "fp64", "without_dropout": True, "max_norm": 0.5}
    whole = run("tied", ModuleLayout(1), tmp_path / "whole", monkeypatch, steps=8, **options)  # type: ignore[arg-type]
    parts = tmp_path / "parts"
    begun = run("tied", ModuleLayout(2, zero=3), parts, monkeypatch, steps=3, **options)  # type: ignore[arg-type]
    rest = run("tied", ModuleLayout(2), parts, monkeypatch, steps=8, resume=True, **options)  # type: ignore[arg-type]
    assert rest.first_step == 3
    # eight steps of 8 samples are more than an epoch of 44
    assert begun.losses + rest.losses == pytest.approx(whole.losses, rel=1e-12)
    first, second = (read_weights(result.weights) for result in (whole, rest))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], rtol=1e-9, atol=1e-12) for name in first)
    lines = (parts / "metrics.jsonl").read_text().splitlines()
    assert [f'"step": {number}' in line for number, line in enumerate(lines)] == [True] * 8


def test_a_run_goes_on_with_parameters_that_had_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = run("routed", ModuleLayout(1), tmp_path, monkeypatch, verify=False)
    rest = run("routed", ModuleLayout(2, zero=3), tmp_path, monkeypatch, verify=False, steps=4, resume=True)
    assert (rest.first_step, len(begun.losses), len(rest.losses)) == (2, 2, 2)


def test_another_run_is_not_mixed_with_the_one_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("spectral", ModuleLayout(1), tmp_path, monkeypatch, verify=False)
    with pytest.raises(UserError, match="nearest: --resume or --replace"):
        run("spectral", ModuleLayout(1), tmp_path, monkeypatch, verify=False)


def test_bf16_has_main_weights_in_fp32_and_moves_them_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"verify": False, "without_dropout": True, "steps": 6}
    exact = run("tied", ModuleLayout(1), tmp_path / "exact", monkeypatch, **options)  # type: ignore[arg-type]
    for number, layout in enumerate((ModuleLayout(1), ModuleLayout(2), ModuleLayout(2, zero=3))):
        narrow = run("tied", layout, tmp_path / str(number), monkeypatch, precision="bf16", **options)  # type: ignore[arg-type]
        weights = read_weights(narrow.weights)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        assert narrow.losses == pytest.approx(exact.losses, rel=2e-2)
        assert narrow.losses[-1] < narrow.losses[0]


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_values_in_fp32_meet_shards_in_bf16(
    recompute: Recompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its mask, its buffer and a part without gradients are in fp32
    options = {"verify": False, "steps": 3}
    exact = run("woven", ModuleLayout(1), tmp_path / "exact", monkeypatch, **options)  # type: ignore[arg-type]
    layout = ModuleLayout(2, zero=3, recompute=recompute)
    narrow = run("woven", layout, tmp_path / "narrow", monkeypatch, precision="bf16", **options)  # type: ignore[arg-type]
    assert narrow.losses == pytest.approx(exact.losses, rel=2e-2)


def test_two_hosts_train_what_one_host_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_namespaces()
    monkeypatch.setenv("KIND", "tied")
    job = TrainJob(str(ZOO), ModuleLayout(2, zero=2), steps=3, checkpoint_every=2)
    script = prepare_training(job, tmp_path, Hosts.from_ranks(2, 1, Rendezvous("a", 29519)))
    result = run_two_hosts(script)
    assert result.returncode == 0, Path(f"{script}.a.log").read_text()[-2000:]
    far = collect_training(tmp_path)
    near = train(job, tmp_path / "near")
    assert far.losses == near.losses
    for name, values in read_weights(near.weights).items():
        assert torch.equal(values, read_weights(far.weights)[name])
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_a_run_of_hosts_that_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a job\.json; `meshwise train --rendezvous` writes it"):
        collect_training(tmp_path)
    job = TrainJob(str(ZOO), ModuleLayout(2), steps=3)
    prepare_training(job, tmp_path, Hosts.from_ranks(2, 1, Rendezvous("elsewhere.invalid")))
    with pytest.raises(ExecutionError, match=r"no step is done; run `sh .*host\.sh NUMBER` on each host"):
        collect_training(tmp_path)
    line = '{"step": 0, "loss": 1.0, "seconds": 1.0, "samples": 4, "tokens": null, "learning_rate": 0.1}\n'
    for rank in range(2):
        metrics_file(tmp_path, rank).write_text(line)
    with pytest.raises(ExecutionError, match="1 of 3 steps are done; a run that was stopped goes on with --resume"):
        collect_training(tmp_path)
