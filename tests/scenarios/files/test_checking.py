"""Each kind of bad input: one message, at the right line and column, that says what would do."""

import pytest

from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.loader import read_scenario
from meshwise.simulator.catalog import cluster_names
from meshwise.strategies.schedules.schedule import SCHEDULES

GOOD = """\
name: small
model:
  transformer:
    layers: 4
    hidden: 48
    heads: 6
    ffn: 192
    vocab: 256
training:
  global_batch: 16
  sequence: 64
  precision: fp32
cluster:
  preset: local-cpu
  nodes: 1
  devices_per_node: 4
plan:
  data: 2
  tensor: 2
  pipeline: 1
  microbatch: 4
"""


def messages(text: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        read_scenario(parse_document(text.encode(), "s.yaml"))
    return str(caught.value).splitlines()


def changed(**changes: str) -> str:
    """Return GOOD with the lines of some fields replaced."""
    lines = []
    for line in GOOD.splitlines():
        key = line.strip().split(":")[0]
        lines.append(line[: len(line) - len(line.lstrip())] + changes.pop(key) if key in changes else line)
    assert not changes
    return "\n".join(lines) + "\n"


def test_the_good_one_is_good() -> None:
    assert read_scenario(parse_document(GOOD.encode())).choose_plan().tensor == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            changed(precision="precison: fp32"),
            "s.yaml:12:3: training.precison: there is no such field; "
            "known: global_batch, sequence, precision, optimizer, gradient_precision, state_precision, fp8_scaling, "
            "gradient_clipping, framework, "
            "kernels, loss, launch, expandable_segments, frozen, sequence_lengths, packing, sequence_order; "
            "nearest: precision",
        ),
        (
            changed(layers='layers: "4"'),
            "s.yaml:4:5: model.transformer.layers: holds a whole number, met '4'; nearest: 4",
        ),
        (
            changed(data="data: 3", global_batch="global_batch: 24"),
            "s.yaml:18:3: plan.data: data(3) * tensor(2) * pipeline(1) = 6 ranks, cluster has 4; data: 2 would do",
        ),
        (
            changed(data="data: 1", tensor="tensor: 4"),
            "s.yaml:19:3: plan.tensor: tensor divides heads(6), met 4; nearest: 3",
        ),
        (
            changed(microbatch="microbatch: 5"),
            "s.yaml:21:3: plan.microbatch: microbatch(5) * data(2) = 10 divides global_batch(16); "
            "nearest microbatch: 4",
        ),
        (changed(heads="heads: 7"), "s.yaml:6:5: model.transformer.heads: heads divide hidden(48), met 7"),
        (
            changed(layers="layers: 1e12"),
            "s.yaml:4:5: model.transformer.layers: is at most 10000, met 1000000000000; nearest: 10000",
        ),
        (
            changed(nodes="nodes: 1000000000"),
            "s.yaml:15:3: cluster.nodes: is at most 1000000, met 1000000000; nearest: 1000000",
        ),
        (
            changed(nodes="nodes: 1000000"),
            "s.yaml:15:3: cluster.nodes: nodes * devices_per_node are at most 1000000 devices, met 4000000",
        ),
        (
            changed(precision="precision: bf16"),
            "s.yaml:12:3: training.precision: accelerator CPU core has no peak for bf16; known: fp32, fp64",
        ),
        (
            changed(precision="precision: fp8"),
            "s.yaml:12:3: training.precision: accelerator CPU core has no peak for fp8; known: fp32, fp64",
        ),
        (
            changed(precision="gradient_precision: fp16"),
            "s.yaml:12:3: training.gradient_precision: holds one of fp32, same, met 'fp16'; nearest: fp32",
        ),
        (
            changed(microbatch="context: true"),
            "s.yaml:21:3: plan.context: holds a whole number, met true",
        ),
        (
            changed(microbatch="expert: 2"),
            "s.yaml:21:3: plan.expert: the model has no experts, met expert 2; nearest: 1",
        ),
        (
            changed(microbatch="recompute: {full: 12}"),
            "s.yaml:21:3: plan.recompute: a stage has at most 4 layers to recompute, met 12; nearest: 4",
        ),
        (
            changed(microbatch="recompute: {operators: [attentoin]}"),
            "s.yaml:21:3: plan.recompute: recompute names operators of a layer: input_norm, qkv, attention, "
            "projection, attention_residual, feed_forward_norm, up, activation, down, feed_forward_residual; "
            "met attentoin; nearest: attention",
        ),
        (
            changed(microbatch="recompute: ful"),
            "s.yaml:21:3: plan.recompute: recompute is one of none, selective, full, activation, "
            "{full: layers a stage}, {selective: layers a stage}, {operators: [names]} and a list of these, "
            "met 'ful'; nearest: full",
        ),
        (
            changed(microbatch="recompute: [full, none]"),
            "s.yaml:21:3: plan.recompute: recompute of a list has one a stage, of 1 in all, met 2",
        ),
        (
            changed(microbatch="sequence_parallel: yes"),
            "s.yaml:21:3: plan.sequence_parallel: holds true or false, met 'yes'; nearest: true",
        ),
        (
            changed(microbatch="schedule: 1f2b"),
            f"s.yaml:21:3: plan.schedule: holds one of {', '.join(SCHEDULES)}, met '1f2b'; nearest: 1f1b",
        ),
        (changed(microbatch="zero: 4"), "s.yaml:21:3: plan.zero: holds one of 0, 1, 2, 3, met 4"),
        (
            changed(microbatch="zero_shards: 2"),
            "s.yaml:21:3: plan.zero_shards: zero_shards needs zero of at least 1, met 2 with zero 0; nearest: 0",
        ),
        (
            changed(microbatch="reshard_after_forward: false"),
            "s.yaml:21:3: plan.reshard_after_forward: reshard_after_forward: false needs zero 3, met zero 0; "
            "nearest: true",
        ),
        (
            changed(preset="preset: dgx-a100-80g"),
            f"s.yaml:14:3: cluster.preset: holds one of {len(cluster_names())} names that `meshwise list clusters` "
            "shows, met 'dgx-a100-80g'; nearest: dgx-a100-80gb",
        ),
        (changed(sequence="sequence: 0"), "s.yaml:11:3: training.sequence: is at least 1, met 0; nearest: 1"),
        (
            changed(global_batch="global_batch:"),
            "s.yaml:10:3: training.global_batch: holds a whole number, met nothing",
        ),
        (GOOD + "search: {algorithm: exhaustiv}\n", None),
        (
            GOOD + "search: {seconds: 5}\n",
            "s.yaml:22:10: search.seconds: a time has a unit, met 5; write a number and a unit, as in '2 us'",
        ),
        (GOOD + "search: {space: {zero: [0, 4]}}\n", None),
        (GOOD + "search: {options: {colour: 1}}\n", None),
        (GOOD + "search: {space: {tensor: []}}\n", "s.yaml:22:18: search.space.tensor: has at least 1 items, met 0"),
    ],
)
def test_one_mistake_is_one_message(text: str, message: str | None) -> None:
    met = messages(text)
    assert len(met) == 1
    assert message is None or met == [message]
    assert met[0].startswith("s.yaml:")


def test_a_wrong_algorithm_names_the_nearest() -> None:
    assert messages(GOOD + "search: {algorithm: exhaustiv}\n")[0].endswith("met 'exhaustiv'; nearest: exhaustive")


def test_everything_is_reported_at_once_even_across_sections() -> None:
    text = (
        changed(data="data: 3", name="nam: x", global_batch="global_batch: 24")
        + "search: {seconds: 5}\nmeasured: {step_time: 3 m}\n"
    )
    fields = [line.split(": ")[1] for line in messages(text)]
    assert fields == ["nam", "plan.data", "search.seconds", "measured.source", "measured.step_time"]


def test_a_missing_section_is_one_message_at_the_top() -> None:
    lines = GOOD.splitlines()
    without = "\n".join(lines[:8] + lines[12:]) + "\n"
    assert messages(without) == ["s.yaml:1:1: training: this field is required"]


@pytest.mark.parametrize("text", ["", "null", "[]", "text", "42"])
def test_a_file_without_fields_is_one_message(text: str) -> None:
    assert len(messages(text)) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"global_batch": "global_batch: 1000000", "data": "data: 4", "tensor": "tensor: 1",
             "microbatch": "microbatch: 1"},
            "plan.microbatch",
        ),
        (
            {"layers": "layers: 1000", "global_batch": "global_batch: 100000", "data": "data: 1",
             "tensor": "tensor: 1", "pipeline": "pipeline: 1000", "nodes": "nodes: 250", "microbatch": "microbatch: 1"},
            "plan.pipeline",
        ),
    ],
)  # fmt: skip
def test_a_step_too_long_to_be_listed_is_a_message(changes: dict[str, str], field: str) -> None:
    assert [line.split(": ")[1] for line in messages(changed(**changes))] == [field]


def test_a_cluster_file_is_read_beside_the_scenario_and_its_faults_are_its_own(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("name: x\nnodes: 0\n")
    text = changed(preset="file: c.yaml", nodes="nodes: 1")
    with pytest.raises(ScenarioError) as caught:
        read_scenario(parse_document(text.encode(), str(tmp_path / "s.yaml")))
    assert {fault.file for fault in caught.value.faults} == {str(tmp_path / "c.yaml")}
    assert (2, 1, "nodes") in [(fault.line, fault.column, fault.field) for fault in caught.value.faults]
