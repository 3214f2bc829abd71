"""Files that are read back are data: whatever they hold, there is a value or one message with its place."""

import ast
import random
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_requests import TRAINING, request

from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.interchange.target import Target
from meshwise.scenarios.interchange.targets import TARGETS
from meshwise.simulator.files import is_plain

from .golden import GOLDEN

EACH_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
WORDS = (
    "-1",
    "0",
    "999999999999",
    "1e9",
    "nan",
    "true",
    "None",
    "[]",
    "[[1]]",
    "'x'",
    "{}",
    "~",
    "$(reboot)",
    "\\",
    '"',
    "()",
)


def _met(target: Target, content: bytes) -> None:
    try:
        target.read(content, "file")
    except ScenarioError as error:
        assert str(error).startswith("file")
        assert is_plain(str(error))


@EACH_TARGET
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=60, deadline=None)
def test_any_bytes(target: Target, content: bytes) -> None:
    _met(target, content)


@EACH_TARGET
@given(seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_a_good_file_with_some_words_changed(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    lines = GOLDEN[target.name].split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        words = lines[at].split(" ")
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        lines[at] = rng.choice([" ".join(words), "", lines[rng.randrange(len(lines))]])
    _met(target, "\n".join(lines).encode())


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("torchtitan", "seq_len = 8192", "seq_len = __import__('os')", "file:5:5: a value is a number, text"),
        ("torchtitan", "return config", "import os", "file:20:5: a line sets a field of config"),
        ("torchtitan", "seq_len", "seq_lem", "file:5:5: training.seq_lem: the field map of torchtitan 0.3.0 has no"),
        ("torchtitan", "'layers.3'", "'layers.2'", "names tok_embeddings, all layers in their order"),
        (
            "torchtitan",
            "global_batch_size = 64",
            "global_batch_size = 128",
            "file:4:5: training.global_batch_size: a step",
        ),
        ("megatron", "--bf16", "--bf16 $(reboot)", "file:28:5: a line is an argument and its words"),
        ("megatron", "--bf16", "--bf17", "has no such key; nearest: --bf16"),
        ("megatron", "Et|ttt|tt|ttL", "Et|ttt|tt|tL", "has the layers of --num-layers 8, met 7"),
        (
            "megatron",
            "-parallel-size 2\n    --p",
            "-parallel-size 3\n    --p",
            "file:4:1: NPROC_PER_NODE: NNODES * NPROC_PER_NODE is a multiple",
        ),
        ("megatron", "--micro-batch-size 2", "--bf16", "--bf16 is stated once, met it again"),
        ("deepspeed", '"stage": 3', '"stage": 4', "file:10:25: zero_optimization.stage: is 0, 1, 2 or 3, met 4"),
        ("deepspeed", '"stage": 3', '"stage": true', "holds a whole number of at least 0, met true"),
        ("deepspeed", '"train_batch_size": 64', '"train_batch_size": 60', "is a multiple of train_micro_batch"),
        (
            "accelerate",
            "num_processes: 16",
            "num_processes: 8",
            "is dp_replicate(2) * dp_shard(2) * tp(2) * cp(2), met 8",
        ),
        ("accelerate", "distributed_type: FSDP", "distributed_type: MULTI_GPU", "needs distributed_type FSDP"),
        ("accelerate", "# script: per", "# scripts: per", "script.per_device_train_batch_size: is needed, met nothing"),
        ("nanotron", "zero_stage: 1", "zero_stage: 3", "file:5:3: optimizer.zero_stage: is one of 0, 1, met 3"),
        ("nanotron", "vocab_size: 256", "vocab_size: 99999", "leaves no rank without layers, met 2 of 8 layers"),
    ],
)
def test_one_clear_message(name: str, old: str, new: str, message: str) -> None:
    text = GOLDEN[name]
    assert old in text
    with pytest.raises(ScenarioError) as error:
        TARGETS[name].read(text.replace(old, new).encode(), "file")
    assert message in str(error.value)


@EACH_TARGET
def test_names_cannot_leave_their_comment(target: Target) -> None:
    name = '"""\nimport os\n*/ $(reboot) `x` \\ \' }'
    training = replace(TRAINING, gradient_precision="same")
    text = target.to_text(request("llama", training, name=name))
    assert target.read(text.encode()) == target.read(target.to_text(request("llama", training, name="x")).encode())
    if target.name == "torchtitan":
        module = ast.parse(text)
        docstring, *rest = module.body
        assert isinstance(docstring, ast.Expr)
        assert {type(each) for each in rest} == {ast.ImportFrom, ast.Assign, ast.FunctionDef}
    if target.name == "megatron":
        done = subprocess.run(["bash", "-c", f"torchrun() {{ printf '%s\\n' \"$@\"; }}\n{text}"], capture_output=True)
        words = done.stdout.decode().split("\n")
        assert done.stderr == b"" and words[words.index("--hidden-size") + 1] == "64"
