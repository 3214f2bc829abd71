"""Loads of scenarios: files of lengths in several forms, distributions, and what is refused with its place."""

from pathlib import Path

import pytest

from meshwise import ScenarioError, load
from meshwise.scenarios.files.reader import MAX_FAULTS
from meshwise.scenarios.inputs.loads import read_lengths
from meshwise.strategies.loads.lengths import Lengths
from meshwise.strategies.loads.loads import Loads, Stragglers
from meshwise.strategies.loads.spread import LogNormal, Measured

SCENARIO = """\
name: small
model: {{transformer: {{layers: 2, hidden: 64, heads: 4, ffn: 128, vocab: 64, positions: rotary{model}}}}}
training: {{global_batch: 8, sequence: 64, precision: bf16{training}}}
cluster: {{preset: dgx-a100-80gb, nodes: 1}}
plan: {{data: 8, microbatch: 1}}
{rest}
"""
LENGTHS = ", sequence_lengths: [{length: 16, share: 3}, {length: 64, share: 1}]"
EXPERTS = ", experts: {{count: 8, top_k: 2, ffn: 64, imbalance: {}}}"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_loads(model: str = "", training: str = "", rest: str = "") -> Loads | None:
    Path("s.yaml").write_text(SCENARIO.format(model=model, training=training, rest=rest))
    return load("s.yaml").loads


HISTOGRAM = Lengths((5, 16), (0.25, 0.75))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.csv", "16\n5\n16\n16\n"),
        ("header.csv", "length\n16\n\n5\n16\n16\n"),
        ("counts.csv", "count,length\n1,5\n3,16\n"),
        ("columns.csv", '"id","length","name"\n"a",5,x\nb,16,y\nc,16,z\nd,"16",\n'),
        ("objects.jsonl", '{"length": 16, "text": "a"}\n{"length": 5}\n{"count": 2, "length": 16}\n'),
    ],
)
def test_a_file_of_lengths_has_one_a_line(name: str, text: str) -> None:
    Path(name).write_text(text)
    assert read_lengths(Path(name)) == HISTOGRAM
    loads = read_loads(training=f", sequence_lengths: {name}, packing: pack, sequence_order: balance")
    assert loads == Loads(HISTOGRAM, "pack", "balance")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16\n-5\n", "lengths:2:1: length is a whole number from 1 to 100000000 under a header with the column length"),
        ("16\n1.5\n", "lengths:2:1: length is a whole number"),
        ("tokens\n16\n", "lengths:1:1: length is a whole number from 1 to 100000000 under a header .*, met 'tokens'"),
        ("length,count\n16,0\n", "lengths:2:1: count is a whole number from 1"),
        ('{"length": 16}\n{"length": true}\n', "lengths:2:1: length is a whole number .*, met true"),
        ('{"length": 16}\n{"length": 16\n', "lengths:2:1: length is a whole number"),
        ('{"length": 16}\n{"size": 16}\n', "lengths:2:1: length is a whole number .*, met nothing"),
        ("9" * 5000, "lengths:1:1: length is a whole number"),
        ("\n", "lengths: a file of lengths has one length a line, met none"),
        ("\0", "lengths:1:1: length is a whole number"),
    ],
)
def test_a_line_without_a_length_is_told(text: str, message: str) -> None:
    Path("lengths").write_text(text)
    with pytest.raises(ScenarioError, match=message):
        read_loads(training=", sequence_lengths: lengths")


def test_all_lines_without_a_length_are_told() -> None:
    Path("lengths").write_text("length,count\n16,0\n32,1\nx,y\n")
    with pytest.raises(ScenarioError) as caught:
        read_loads(training=", sequence_lengths: lengths")
    told = [(fault.line, fault.message.split(" ")[0]) for fault in caught.value.faults]
    assert told == [(2, "count"), (4, "length"), (4, "count")]
    Path("lengths").write_text("length,count\n" + "x,y\n" * 1000)
    with pytest.raises(ScenarioError) as caught:
        read_loads(training=", sequence_lengths: lengths")
    assert len(caught.value.faults) == MAX_FAULTS


def test_what_varies_is_read() -> None:
    assert read_loads() is None
    assert read_loads(model=EXPERTS.format(1.5)) is None
    assert read_loads(training=LENGTHS) == Loads(Lengths((16, 64), (0.75, 0.25)))
    shares = LENGTHS.replace("share: 3", "share: 0.75").replace("share: 1", "share: 0.25")
    assert read_loads(training=shares) == Loads(Lengths((16, 64), (0.75, 0.25)))
    spread = EXPERTS.format("{median: 1.2, p95: 1.8}")
    assert read_loads(model=spread) == Loads(imbalance=LogNormal(1.2, 1.8))
    loads = read_loads(
        model=EXPERTS.format("[1.1, 3.0]"),
        rest="loads: {stragglers: {share: 0.1, slowdown: 1.5}, draws: 8, seed: 3, quantile: 0.9}",
    )
    stragglers = Stragglers(0.1, Measured((1.5,)))
    assert loads == Loads(imbalance=Measured((1.1, 3.0)), stragglers=stragglers, draws=8, seed=3, quantile=0.9)
    assert load("s.yaml").spec.experts.imbalance == 3.0  # type: ignore[attr-defined]  # the median of two: the larger


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"training": ", packing: pack"},
            "s.yaml:3:1: training: packing is of samples with sequence_lengths, met none",
        ),
        ({"training": f"{LENGTHS}, packing: tight"}, "training.packing: holds one of none, pack, fixed, met 'tight'"),
        (
            {"training": LENGTHS.replace("3", "0.3").replace("share: 1", "share: 0.5")},
            "training.sequence_lengths: shares sum to 1, or all are whole numbers of samples, met a sum of 0.8",
        ),
        ({"training": ", sequence_lengths: none.csv"}, "none.csv: the file cannot be read: No such file"),
        ({"training": ", sequence_lengths: ../none.csv"}, "s.yaml:3:.*a path stays in the folder of its file"),
        ({"model": EXPERTS.format("{median: 2, p95: 1}")}, r"p95 is at least median\(2\), met 1; nearest: 2"),
        ({"model": EXPERTS.format("{median: 2, p95: 5}")}, r"at most count\(8\) / top_k\(2\) = 4, met 5; nearest: 4"),
        ({"model": EXPERTS.format("{median: 5, p95: 6}")}, r"imbalance is 1 to count\(8\) / top_k\(2\) = 4, met 5"),
        ({"rest": "loads: {draws: 4}"}, "s.yaml:6:1: loads: draws need a load that varies"),
        ({"rest": "loads: {stragglers: {share: 0, slowdown: 2}}"}, "loads.stragglers.share: is more than 0"),
        ({"rest": "loads: {stragglers: {share: 0.1, slowdown: 0.5}}"}, "loads.stragglers.slowdown: is at least 1"),
    ],
)
def test_loads_that_cannot_be_are_refused(parts: dict[str, str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        read_loads(**parts)


def test_images_have_no_lengths() -> None:
    text = SCENARIO.format(model="", training=LENGTHS.replace("64", "197"), rest="").replace(
        "sequence: 64", "sequence: 197"
    )
    lines = text.splitlines()
    Path("s.yaml").write_text("\n".join([lines[0], "model: {preset: vit-h-14}", *lines[2:]]))
    with pytest.raises(ScenarioError, match="lengths need a model of sequences of any length, met"):
        load("s.yaml")
