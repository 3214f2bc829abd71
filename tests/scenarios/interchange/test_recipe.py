"""Files state the run and the published defaults of a family, begin with a command, and are read whatever users set."""

from dataclasses import replace
from typing import Any

import pytest
from small_requests import LLAMA, TRAINING, request

from meshwise.executor.export.launchers import UnsupportedRequest
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.interchange.recipe import find_family
from meshwise.scenarios.interchange.targets import TARGETS
from meshwise.simulator.models.presets import PRESETS

SAME = replace(TRAINING, gradient_precision="same")
COMMANDS = {
    "torchtitan": ("run.py", "# torchrun {}--nproc-per-node {} -m torchtitan.train --module run --config train"),
    "megatron": ("run.sh", "# {}bash run.sh"),
    "deepspeed": (
        "run.json",
        '{{"command": "deepspeed {}--num_gpus {} train.py --deepspeed --deepspeed_config run.json",',
    ),
    "accelerate": ("run.yaml", "# accelerate launch --config_file run.yaml {}train.py"),
    "nanotron": ("run.yaml", "# torchrun {}--nproc-per-node {} run_train.py --config-file run.yaml"),
}
SEVERAL = {
    "torchtitan": "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 ",
    "megatron": "NODE_RANK=0 MASTER_ADDR=HOST0 ",
    "deepspeed": "--hostfile HOSTS --num_nodes 2 ",
    "accelerate": "--machine_rank 0 --main_process_ip HOST0 --main_process_port 29500 ",
    "nanotron": "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 ",
}


@pytest.mark.parametrize(
    ("preset", "base", "epsilon"),
    [
        ("llama2-7b", 10_000, 1e-5),
        ("llama3-70b", 500_000, 1e-5),
        ("mixtral-8x7b", 1_000_000, 1e-5),
        ("qwen3-30b-a3b", 1_000_000, 1e-6),
        ("gpt3-175b", 10_000, 1e-5),
    ],
)
def test_a_preset_has_the_defaults_of_its_family(preset: str, base: int, epsilon: float) -> None:
    family = find_family(PRESETS[preset])
    assert (family.rotary_base, family.norm_epsilon) == (base, epsilon)


def test_a_model_without_a_known_name_is_known_by_its_vocabulary_or_norms() -> None:
    unnamed = replace(PRESETS["llama3-8b"], name="transformer")
    assert find_family(unnamed) == find_family(PRESETS["llama3-8b"])
    assert find_family(replace(unnamed, vocab=32_000)) == find_family(PRESETS["llama2-7b"])
    assert find_family(replace(unnamed, vocab=32_000, qk_norm=True)) == find_family(PRESETS["qwen3-8b"])


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_line_is_the_command_of_the_file(name: str, ranks: int) -> None:
    file, command = COMMANDS[name]
    layout: dict[str, Any] = {"data": ranks, "zero": 0, "overlap_gradients": name != "deepspeed"}
    text = TARGETS[name].to_text(replace(request("llama", SAME, **layout), file=f"folder/{file}"))
    first_line = text.split("\n", 1)[0]
    assert first_line == command.format(SEVERAL[name] if ranks == 16 else "", min(ranks, 8))


def test_a_file_name_that_a_shell_would_read_is_left_out() -> None:
    asked = request("llama", SAME, data=2)
    for file in ("a b.sh", "$(reboot).sh", "-x.sh", "x;y.sh"):
        text = TARGETS["megatron"].to_text(replace(asked, file=file))
        assert text.startswith("# bash plan.sh\n")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("torchtitan", "LEARNING_RATE = 0.0003", "LEARNING_RATE = 1e-4"),
        ("torchtitan", "ROTARY_BASE = 10000", "ROTARY_BASE = 500000"),
        ("megatron", "LEARNING_RATE=0.0003", "LEARNING_RATE=1e-4  # mine"),
        ("megatron", "DATA=TRAINING_DATA", 'DATA="my data/tokens"'),
        ("megatron", '--lr "$LEARNING_RATE"', "--lr 0.0001"),
        ("deepspeed", '"lr": 0.0003', '"lr": 0.0001'),
        ("accelerate", "learning_rate = 0.0003", "learning_rate = 1e-4"),
        ("nanotron", "learning_rate: 0.0003", "learning_rate: 0.0001"),
    ],
)
def test_what_is_the_users_to_set_changes_no_fact(name: str, old: str, new: str) -> None:
    target = TARGETS[name]
    zero = 1 if name == "nanotron" else 3
    text = target.to_text(request("llama", SAME, data=4, zero=zero))
    assert old in text
    assert target.read(text.replace(old, new).encode()) == target.read(text.encode())


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("torchtitan", "HIDDEN = 64\n", "", "HIDDEN: is needed, met nothing"),
        ("torchtitan", "LEARNING_RATE = ", "LEARNING_RAT = ", "no such key; nearest: LEARNING_RATE"),
        ("torchtitan", "CLIPPING = 1.0", "CLIPPING = 0", "CLIPPING: is the largest norm"),
        ("megatron", "WARMUP=100", "WARMUP=$(reboot)", "nothing for a shell to expand"),
        ("megatron", '--lr "$LEARNING_RATE"', '--lr "$HOME"', "nothing for a shell to expand"),
        ("megatron", "--padded-vocab-size 64", "--padded-vocab-size 128", "is --vocab-size 64, met 128"),
        ("deepspeed", '"fp32"', '"fp16"', "data_types.grad_accum_dtype: is one of"),
    ],
)
def test_what_a_plan_or_model_hangs_on_is_checked(name: str, old: str, new: str, message: str) -> None:
    text = TARGETS[name].to_text(request("llama", data=4, zero=3))
    assert old in text
    with pytest.raises(ScenarioError) as error:
        TARGETS[name].read(text.replace(old, new, 1).encode())
    assert message in str(error.value)


def test_a_torchtitan_module_states_the_model_that_it_builds() -> None:
    target = TARGETS["torchtitan"]
    asked = request("llama", data=2)
    facts = target.read(target.to_text(asked).encode())
    assert {name: facts[f"model.{name}"] for name in ("layers", "hidden", "kv_heads", "ffn", "vocab")} == {
        name: getattr(LLAMA, name) for name in ("layers", "hidden", "kv_heads", "ffn", "vocab")
    }
    assert not any(name.startswith("model.") for name in target.read(target.to_text(request("gpt")).encode()))


def test_trainers_refusals_are_told_before_they_run() -> None:
    tied = replace(request("llama", pipeline=2), spec=replace(LLAMA, tied_embeddings=True))
    with pytest.raises(UnsupportedRequest, match=r"model\.tied_embeddings: false with a pipeline"):
        TARGETS["torchtitan"].to_text(tied)
    with pytest.raises(UnsupportedRequest, match=r"training\.gradient_precision: same with zero 0"):
        TARGETS["deepspeed"].to_text(request("llama", data=2, overlap_gradients=False))
