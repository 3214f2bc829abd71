"""Every choice is said in the trainer's own word, as its source lists it."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from small_requests import MODELS, TRAINING, request

from meshwise.executor.export.launchers import UnsupportedRequest
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.interchange.lines import flatten_document
from meshwise.scenarios.interchange.target import is_compatible
from meshwise.scenarios.interchange.targets import TARGETS
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators

RING, GATHER, ULYSSES = Attention.RING, Attention.ALL_GATHER, Attention.ULYSSES
BOTH = Offloading(optimizer=(1.0,), parameters=(1.0,))
CHUNKED: dict[str, Any] = {"pipeline": 2, "chunks": 2}
SHARDED: dict[str, Any] = {"data": 4, "zero": 3}
BY, FSDP, PC = "parallelism.", "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
TITAN_SCHEDULE = f"{BY}pipeline_parallel_schedule"
MODEL = "model.model_config."
MLP: dict[str, Any] = {"recompute": SomeOperators(("up", "activation", "down"))}
MIXED: dict[str, Any] = {"model": "mixture"}
DISPATCHER = "--moe-token-dispatcher-type: is alltoall with --num-experts, as plans are priced, met "
FIRST: dict[str, Any] = {"pipeline": 2, "recompute": FirstLayers(Recompute.FULL, 3)}
ACTIVATION: dict[str, Any] = {"model": "llama", "recompute": SomeOperators(("activation",))}
SAME, FP8 = replace(TRAINING, gradient_precision="same"), replace(TRAINING, precision="fp8")
KEPT: dict[str, Any] = {"data": 4, "zero": 3, "reshard_after_forward": False, "training": SAME}


@pytest.mark.parametrize(
    ("name", "choice", "expected"),
    [
        ("torchtitan", {"pipeline": 2, "schedule": "gpipe"}, {TITAN_SCHEDULE: "GPipe"}),
        ("torchtitan", {"pipeline": 2}, {TITAN_SCHEDULE: "1F1B", "training.disable_cuda_graphs": True}),
        ("torchtitan", CHUNKED | {"schedule": "interleaved"}, {TITAN_SCHEDULE: "Interleaved1F1B"}),
        ("torchtitan", CHUNKED | {"schedule": "looped_bfs"}, {TITAN_SCHEDULE: "LoopedBFS"}),
        ("torchtitan", CHUNKED | {"schedule": "interleaved_zero_bubble"}, {TITAN_SCHEDULE: "InterleavedZeroBubble"}),
        ("torchtitan", CHUNKED | {"schedule": "zbv"}, {TITAN_SCHEDULE: "ZBVZeroBubble"}),
        ("torchtitan", CHUNKED | {"schedule": "dualpipev"}, {TITAN_SCHEDULE: "DualPipeV"}),
        ("torchtitan", SHARDED, {f"{BY}fsdp_reshard_after_forward": "always", "activation_checkpoint": "None"}),
        ("torchtitan", SHARDED | {"reshard_after_forward": False}, {f"{BY}fsdp_reshard_after_forward": "never"}),
        ("torchtitan", SHARDED | {"offload": BOTH}, {"training.enable_cpu_offload": True}),
        ("torchtitan", {"recompute": Recompute.FULL}, {"activation_checkpoint": "FullAC.Config()"}),
        ("torchtitan", {"tensor": 2}, {f"{BY}enable_sequence_parallel": False}),
        ("megatron", {"context": 2, "attention": RING}, {"--cp-comm-type": "p2p"}),
        ("megatron", {"context": 2, "attention": GATHER}, {"--cp-comm-type": "allgather"}),
        ("megatron", {"context": 2, "attention": ULYSSES}, {"--cp-comm-type": "a2a"}),
        ("megatron", CHUNKED | {"schedule": "interleaved"}, {"--num-virtual-stages-per-pipeline-rank": 2}),
        ("megatron", {"data": 2, "zero": 2}, {"--data-parallel-sharding-strategy": "optim_grads"}),
        ("megatron", {"data": 2, "zero": 3}, {"--data-parallel-sharding-strategy": "optim_grads_params"}),
        ("megatron", {"recompute": Recompute.FULL}, {"--recompute-method": "uniform", "--recompute-num-layers": 1}),
        ("megatron", {"recompute": Recompute.SELECTIVE}, {"--recompute-granularity": "selective"}),
        ("megatron", {"recompute": FirstLayers(Recompute.FULL, 3)}, {"--recompute-method": "block"}),
        (
            "megatron",
            {"recompute": SomeOperators(("up", "activation", "down"))},
            {"--recompute-granularity": "selective", "--recompute-modules": "mlp"},
        ),
        (
            "megatron",
            {"model": "mixture", "recompute": SomeOperators(("expert_activation",))},
            {"--recompute-modules": "moe_act"},
        ),
        (
            "torchtitan",
            {"recompute": FirstLayers(Recompute.FULL, 3)},
            {"activation_checkpoint": "FirstLayersAC.Config(layers=3)"},
        ),
        ("torchtitan", ACTIVATION, {"activation_checkpoint": "None", "recompute_activations": True}),
        ("torchtitan", {"training": FP8}, {"multiply_in_float8": True}),
        (
            "megatron",
            KEPT,
            {
                "--use-torch-fsdp2": True,
                "--torch-fsdp2-no-reshard-after-forward": True,
                "--no-gradient-accumulation-fusion": True,
                "--ckpt-format": "torch_dist",
            },
        ),
        ("megatron", {"model": "llama"}, {"--position-embedding-type": "rope", "--normalization": "RMSNorm"}),
        (
            "megatron",
            {"model": "mixture", "data": 2},
            {"--moe-token-dispatcher-type": "alltoall", "--moe-grouped-gemm": True},
        ),
        ("megatron", {"model": "mixture"}, {"--moe-layer-freq": "([0]*1+[1]*7)", "--num-experts": 8}),
        ("deepspeed", {"context": 2, "attention": ULYSSES, "zero": 1}, {"sequence_parallel_size": 2}),
        ("deepspeed", SHARDED | {"offload": BOTH}, {"zero_optimization.offload_param.device": "cpu"}),
        ("accelerate", SHARDED | {"context": 2, "attention": RING}, {f"{PC}cp_comm_strategy": "alltoall"}),
        ("accelerate", SHARDED | {"context": 2, "attention": GATHER}, {f"{PC}cp_comm_strategy": "allgather"}),
        (
            "accelerate",
            SHARDED,
            {"distributed_type": "FSDP", f"{FSDP}version": 2, f"{FSDP}reshard_after_forward": True},
        ),
        ("accelerate", {"data": 2}, {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}),
        ("accelerate", {}, {"distributed_type": "NO", "num_processes": 1}),
        ("accelerate", {"data": 2, "zero": 2, "overlap_gradients": False}, {"distributed_type": "DEEPSPEED"}),
        ("nanotron", {"model": "llama", "schedule": "1f1b"}, {f"{BY}pp_engine": "1f1b"}),
        ("nanotron", {"model": "llama", "tensor": 2, "sequence_parallel": True}, {f"{BY}tp_mode": "REDUCE_SCATTER"}),
        ("nanotron", {"model": "llama", "context": 2}, {f"{MODEL}_attn_implementation": "ring"}),
        (
            "nanotron",
            {"model": "llama"},
            {f"{MODEL}_attn_implementation": "flash_attention_2", "model.dtype": "bfloat16"},
        ),
    ],
)
def test_word(name: str, choice: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _values(name, **choice) | expected == _values(name, **choice)


@pytest.mark.parametrize(
    ("name", "precision", "present", "absent"),
    [
        ("megatron", "bf16", {"--bf16": True}, "--fp8-format"),
        ("megatron", "fp8", {"--bf16": True, "--fp8-format": "hybrid"}, "--fp16"),
        ("megatron", "fp16", {"--fp16": True}, "--bf16"),
        ("megatron", "fp32", {}, "--bf16"),
        ("deepspeed", "fp16", {"fp16.enabled": True, "data_types.grad_accum_dtype": "fp16"}, "bf16.enabled"),
        ("deepspeed", "bf16", {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"}, "fp16.enabled"),
        ("accelerate", "fp32", {"mixed_precision": "no"}, "fp8_config"),
        ("torchtitan", "fp32", {"training.mixed_precision_param": "float32"}, "training.dtype"),
    ],
)
def test_precision(name: str, precision: str, present: dict[str, Any], absent: str) -> None:
    values = _values(name, training=replace(TRAINING, precision=precision), data=4, zero=3)
    assert values | present == values and absent not in values


@pytest.mark.parametrize(
    ("name", "choice", "old", "new", "message"),
    [
        ("megatron", MLP, "modules mlp", "modules layernorm", "is some of core_attn, mlp, moe_act, shared_experts"),
        ("megatron", MLP, "modules mlp", "modules mlp mlp", "each once"),
        ("megatron", MLP, "modules mlp", "modules moe_act", "moe_act needs --num-experts"),
        (
            "megatron",
            MIXED,
            "    --moe-token-dispatcher-type alltoall\n",
            "",
            DISPATCHER + "none: .* gathers all tokens",
        ),
        ("megatron", MIXED, "type alltoall", "type allgather", DISPATCHER + "'allgather'"),
        ("megatron", MIXED, "    --moe-grouped-gemm\n", "", "--moe-grouped-gemm: is needed with --num-experts"),
        ("megatron", MIXED, "    --disable-bias-linear\n", "", "--disable-bias-linear: is needed with --num-experts"),
        ("megatron", MLP, "modules mlp", "modules mla_up_proj", "mla_up_proj needs --multi-latent-attention"),
        (
            "megatron",
            MLP,
            "granularity selective",
            "granularity none",
            "needs --recompute-granularity selective, met none",
        ),
        ("torchtitan", FIRST, "layers=3", "layers=0", "is None, FullAC.Config\\(\\) or FirstLayersAC"),
        ("torchtitan", FIRST, "<= self.config.layers", "> 1", "a line sets a field of config"),
        ("torchtitan", ACTIVATION, "silu(gate) * up", "gate", "a line sets a field of config"),
        ("torchtitan", ACTIVATION, "    recompute_activations(config)", "    run(config)", "a line sets a field of"),
        ("torchtitan", ACTIVATION, "checkpoint = None", "checkpoint = FullAC.Config()", "None where recompute_activ"),
        ("torchtitan", {"training": FP8}, '["lm_head"]', "[]", "a line sets a field of config"),
        (
            "torchtitan",
            {"training": FP8},
            "    config.training.seq_len",
            "    config.training.mixed_precision_param = 'float32'\n    config.training.seq_len",
            "bfloat16 where multiply_in_float8 is called, met float32",
        ),
        ("megatron", KEPT, "    --use-torch-fsdp2\n", "", "needs --use-torch-fsdp2, met none"),
        (
            "megatron",
            KEPT,
            "    --no-gradient-accumulation-fusion\n",
            "",
            "--no-gradient-accumulation-fusion.*is needed",
        ),
        ("megatron", KEPT, "    --untie-embeddings-and-output-weights\n", "", "--untie-embed.*is needed"),
        ("megatron", KEPT, "format torch_dist", "format fsdp_dtensor", "is one of .*torch_dist.*torch_dcp"),
        (
            "megatron",
            KEPT,
            "    --bf16",
            "    --use-distributed-optimizer\n    --bf16",
            "goes without --use-torch-fsdp2",
        ),
        ("megatron", KEPT, "    --bf16", "    --expert-model-parallel-size 2\n    --bf16", "1 with --use-torch-fsdp2"),
        (
            "megatron",
            KEPT | {"tensor": 2},
            "format torch_dist",
            "format torch_dcp",
            "torch_dist with tensor ranks, met torch_dcp",
        ),
    ],
)
def test_a_policy_that_is_read_is_one_that_is_written(
    name: str, choice: dict[str, Any], old: str, new: str, message: str
) -> None:
    text = TARGETS[name].to_text(request(**choice))
    assert old in text
    with pytest.raises(ScenarioError, match=message):
        TARGETS[name].read(text.replace(old, new).encode(), "file")


@pytest.mark.parametrize(
    ("name", "choice", "reason"),
    [
        ("megatron", KEPT | {"pipeline": 2}, "plan.pipeline: 1 where parameters are kept after forward"),
        (
            "megatron",
            KEPT | {"model": "mixture", "expert": 2},
            "plan.expert: 1 where parameters are kept after forward",
        ),
        ("megatron", KEPT | {"zero_shards": 2}, "plan.zero_shards: 0 with --use-torch-fsdp2"),
        ("megatron", KEPT | {"overlap_gradients": False}, "plan.overlap_gradients: true with --use-torch-fsdp2"),
        ("megatron", KEPT | {"offload": Offloading(optimizer=(1.0,))}, "plan.offload: nothing with --use-torch-fsdp2"),
        ("megatron", KEPT | {"training": TRAINING}, "training.gradient_precision: same with --use-torch-fsdp2"),
        (
            "megatron",
            KEPT | {"training": replace(SAME, precision="fp16")},
            "training.precision: bf16, fp8 or fp32 with --use-torch-fsdp2",
        ),
        ("megatron", {"model": "mixture", "tensor": 2}, "plan.sequence_parallel: true with experts and tensor ranks"),
        ("torchtitan", ACTIVATION | {"model": "gpt"}, "plan.recompute: the activation of swiglu alone"),
        (
            "torchtitan",
            {"model": "mixture", "recompute": SomeOperators(("expert_activation",))},
            "or the operator activation (activation_checkpoint), met expert_activation",
        ),
        ("torchtitan", {"model": "mixture", "training": FP8}, "training.precision: bf16 or fp32 with experts"),
        ("torchtitan", {"training": replace(TRAINING, precision="fp16")}, "training.precision: bf16, fp8 or fp32"),
    ],
)
def test_what_goes_with_nothing_else_is_refused_with_the_reason(name: str, choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedRequest) as error:
        TARGETS[name].to_text(request(**choice))
    assert reason in str(error.value)


def test_fsdp2_needs_embeddings_of_their_own() -> None:
    asked = request(**KEPT)
    with pytest.raises(UnsupportedRequest, match=r"model\.tied_embeddings: false with --use-torch-fsdp2"):
        TARGETS["megatron"].to_text(replace(asked, spec=replace(asked.spec, tied_embeddings=True)))


def test_products_of_experts_have_no_biases() -> None:
    asked = request("mixture")
    with pytest.raises(
        UnsupportedRequest, match=r"model\.biases: none or qkv with experts \(--moe-grouped-gemm\), met all"
    ):
        TARGETS["megatron"].to_text(replace(asked, spec=replace(asked.spec, biases="all")))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("clips", [True, False])
def test_a_script_remarks_on_what_it_takes_for_granted(model: str, clips: bool) -> None:
    """Gradients that are not clipped, and the load of experts, are said in comments; comments mean nothing."""
    asked = request(model, training=replace(TRAINING, gradient_clipping=clips))
    text = TARGETS["megatron"].to_text(asked)
    assert ("--clip-grad 0.0\n" in text) == ("# --clip-grad 0.0 clips nothing" in text) == (not clips)
    assert ("--num-experts" in text) == ("# Routing is priced with balanced experts." in text) == (model == "mixture")
    bare = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert TARGETS["megatron"].read(bare.encode()) == TARGETS["megatron"].read(text.encode())


def test_the_load_of_experts_is_the_scenarios() -> None:
    asked = request("mixture")
    assert asked.spec.experts is not None
    loaded = replace(asked.spec, experts=replace(asked.spec.experts, imbalance=1.5))
    text = TARGETS["megatron"].to_text(replace(asked, spec=loaded))
    assert "# Routing is priced with an expert of 1.5 times the mean load." in text
    assert TARGETS["megatron"].read(text.encode()) == TARGETS["megatron"].read(
        TARGETS["megatron"].to_text(asked).encode()
    )


def test_fsdp2_gives_parameters_up_where_nothing_else_is_said() -> None:
    text = TARGETS["megatron"].to_text(request(**KEPT)).replace("    --torch-fsdp2-no-reshard-after-forward\n", "")
    facts = TARGETS["megatron"].read(text.replace("    --grad-reduce-in-bf16\n", "").encode())
    assert (facts["plan.zero"], facts["plan.reshard_after_forward"]) == (3, True)
    assert facts["training.gradient_precision"] == "same"  # torch sums what parameters are


def test_a_word_of_two_kernels_is_read_as_either() -> None:
    """Megatron-LM's flash is the FlashAttention that is installed: a scenario of the second one says it so too."""
    megatron = TARGETS["megatron"]
    for kernel in ("flash", "flash_2"):
        asked = request("llama")
        text = megatron.to_text(replace(asked, spec=replace(asked.spec, attention=kernel)))
        said = megatron.read(text.encode())["model.attention"]
        assert "--attention-backend flash\n" in text and str(said) == "flash or flash_2"
        assert is_compatible(said, kernel) and not is_compatible(said, "unfused")
    with pytest.raises(UnsupportedRequest, match=r"model\.attention: flash or flash_2 or unfused .*, met flash_triton"):
        megatron.to_text(replace(asked, spec=replace(asked.spec, attention="flash_triton")))


def test_operators_of_no_module_have_no_words() -> None:
    """No module has the products of the feed-forward alone, and attention alone is what selective means by itself."""
    for names in (("up", "down"), ("qkv",), ("attention",)):
        with pytest.raises(UnsupportedRequest, match=r"plan\.recompute: "):
            TARGETS["megatron"].to_text(request(recompute=SomeOperators(names)))


def test_the_policy_of_a_module_recomputes_the_first_layers() -> None:
    """Run what is written with a base of its own: of four blocks in each of two stages the first three are wrapped."""

    @dataclass
    class Every:
        config: Any

        def _wrap_block(self, module: str, *, base_fqn: str | None = None) -> str:
            return f"again {module}"

    @dataclass(kw_only=True)
    class Config:
        pass

    Every.Config = Config  # type: ignore[attr-defined]
    text = TARGETS["torchtitan"].to_text(request(**FIRST))
    start, end = text.index("class FirstLayersAC"), text.index("def laid_out")
    names: dict[str, Any] = {"FullAC": Every, "dataclass": dataclass, "__name__": __name__}
    exec(text[start:end], names)
    for _ in range(2):
        policy = names["FirstLayersAC"](names["FirstLayersAC"].Config(layers=3))
        assert [policy._wrap_block(block) for block in "abcd"] == ["again a", "again b", "again c", "d"]


def _values(name: str, model: str = "gpt", **choice: Any) -> dict[str, Any]:
    target = TARGETS[name]
    return flatten_document(target.parse(target.to_text(request(model, **choice)).encode(), "file")).values
