import pytest

from meshwise.scenarios.published.frameworks import attention_kernel, launch_time
from meshwise.scenarios.published.network import build_model, find_model
from meshwise.scenarios.published.row import Row, Skip
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.models.vision import VisionTransformer

GPT = {"arch": "gpt", "n_layers": 4, "hidden": 1024, "n_heads": 16, "ffn_hidden": 4096, "vocab": 51200}


def decoder(**fields: object) -> Transformer:
    model = build_model(Row(fields))
    assert isinstance(model, Transformer)
    return model


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Llama-3.1-8B", "llama3-8b"),
        ("LLAMA3_70B", "llama3-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("GPT3-175B", "gpt3-175b"),
        ("Mixtral-8x7B", "mixtral-8x7b"),
        ("DeepSeek-V3", "deepseek-v3"),
        ("DeepSeek-V2-Lite", "deepseek-v2-lite"),
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("bert-large-uncased", "bert-large"),
        ("ResNet-50", "resnet-50"),
        ("T5-11B", "t5-11b"),
    ],
)
def test_models_of_the_library_by_other_names(name: str, preset: str) -> None:
    found = find_model(name)
    assert found is not None and found.name == MODELS[preset].name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.2-1B", 1.24), ("Llama-3.2-3B", 3.21), ("Qwen2.5-0.5B", 0.49), ("Qwen2.5-7B", 7.6),
        ("Qwen2.5-72B", 72.7),
        ("Qwen3-4B", 4.0), ("Gemma-2-9B", 9.2), ("gemma-7b", 8.5), ("Yi-34B", 34.4), ("DeepSeek-LLM-67B", 67.4),
        ("Nemotron-4-340B", 341), ("Nemotron-4-15B", 15.6), ("OPT-66B", 65.7), ("GPT2-XL", 1.56),
        ("GPT-NeoX-20B", 20.6),
        ("BLOOM-176B", 176.2), ("Falcon-40B", 41.3), ("GPT3-20B", 20.3), ("Grok-1", 314), ("DBRX", 132),
        ("LLaMA-65B", 65.3),
        ("Qwen2.5-32B", 32.8), ("Mistral-Nemo-12B", 12.2), ("gpt-oss-120b", 116.8), ("Phi-3-mini", 3.8),
        ("PaLM-540B", 540),
    ],
)  # fmt: skip
def test_models_have_as_many_parameters_as_published(name: str, billions: float) -> None:
    found = find_model(name)
    assert found is not None
    assert found.graph(64, "bf16").num_parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_stated_sizes_win_over_those_of_the_model_named() -> None:
    row = Row({"model": "llama3-70b cut to 12 layers", "arch": "llama", "n_layers": 12})
    model = build_model(row)
    assert isinstance(model, Transformer)
    assert (model.layers, model.hidden, model.kv_heads) == (12, 8192, 8)
    assert "hidden 8192 (not stated; of the model named)" in row.assumed


def test_habits_of_families() -> None:
    gpt = decoder(**GPT)
    assert (gpt.ffn_kind, gpt.tied_embeddings, gpt.positions, gpt.attention) == ("gelu", True, "learned", "flash_2")
    llama = decoder(**GPT | {"arch": "llama", "ffn_type": "swiglu"})
    assert (llama.ffn_kind, llama.tied_embeddings, llama.positions) == ("swiglu", False, "rotary")
    old = decoder(**GPT | {"framework": "Megatron-LM", "accelerator": "A100 SXM"})
    assert (old.attention, old.dropout) == ("unfused", True)
    assert decoder(**GPT | {"framework": "Megatron-LM", "attention_kernel": "FlashAttention-2"}).attention == "flash_2"


def test_dropout_that_is_not_stated_is_the_framework_s_own() -> None:
    for framework, arch, has_dropout in (
        ("Megatron-LM", "gpt", True),  # training/arguments.py: 0.1
        ("Megatron Core", "gpt", True),
        ("Megatron-LM", "llama", False),  # models with gates are trained without
        ("NeMo", "gpt", False),  # its recipes say 0
        ("torchtitan", "gpt", False),
    ):
        row = GPT | {"framework": framework, "attention_kernel": "flash", "arch": arch}
        row |= {"ffn_type": "swiglu"} if arch == "llama" else {}
        assert decoder(**row).dropout == has_dropout, (framework, arch)


@pytest.mark.parametrize(
    ("kernel", "framework", "found"),
    [
        ("flash (attn_impl=flash, triton or cuda not stated)", "llm-foundry/Composer + torch FSDP", "flash_triton"),
        ("flash", "llm-foundry", "flash_triton"),
        ("TransformerEngine flash/cuDNN", "Megatron-LM", "flash"),
        ("sdpa", "torchtitan", "flash_2"),
        ("flash-attn 1.0", "own", "flash_1"),
        ("flash", "MaxText/JAX", "flash"),
    ],
)
def test_which_kernel_attends(kernel: str, framework: str, found: str) -> None:
    row = Row({"attention_kernel": kernel, "framework": framework})
    assert attention_kernel(row) == found
    assert any(line.startswith(f"attention by {found}") for line in row.assumed) == (found != "flash")


@pytest.mark.parametrize(
    ("framework", "microseconds"),
    [("MaxText/JAX", 0), ("Megatron-DeepSpeed", 110), ("NeMo", 110), ("torchtitan", 110), ("", 110)],
)
def test_how_fast_hosts_launch(framework: str, microseconds: int) -> None:
    row = Row({"framework": framework})
    assert launch_time(row) == pytest.approx(microseconds * 1e-6)
    assert any(line.startswith("hosts launch") for line in row.assumed) == (microseconds > 0)


def test_what_is_missing_follows_from_the_rest() -> None:
    row = Row({"arch": "llama", "n_layers": 2, "hidden": 4096})
    model = build_model(row)
    assert isinstance(model, Transformer)
    assert (model.heads, model.kv_heads, model.vocab) == (32, 32, 32000)
    assert model.ffn == 11008  # 8 * 4096 / 3 = 10922.7, up to a multiple of 256
    for field in ("n_heads", "n_kv_heads", "ffn_hidden", "vocab"):
        assert any(line.startswith(field) for line in row.assumed), field


def test_heads_that_are_wider_or_fewer_than_usual() -> None:
    assert decoder(**GPT | {"head_dim": 128}).head_dim == 128
    assert decoder(**GPT | {"hidden": 1000, "n_heads": 16}).head_dim == 63  # 62.5
    row = Row(GPT | {"n_kv_heads": 2, "tp": 8})
    assert build_model(row).kv_heads == 8  # type: ignore[attr-defined]
    assert "keys and values repeated to 8 heads for tensor(8) ranks" in row.assumed


def test_vocabularies_are_padded_as_megatron_does() -> None:
    assert decoder(**GPT | {"vocab": 50257, "tp": 2}).vocab == 50432  # the next multiple of 128 * 2
    assert decoder(**GPT | {"vocab": 32000, "framework": "NeMo", "tp": 4}).vocab == 32256  # 63 * 512
    assert decoder(**GPT | {"vocab": 32000, "framework": "torchtitan", "tp": 4}).vocab == 32000
    # Megatron-DeepSpeed pads where tensor ranks do not divide it
    own = GPT | {"vocab": 50257, "framework": "Megatron-DeepSpeed"}
    assert [decoder(**own | {"tp": tensor}).vocab for tensor in (1, 2)] == [50257, 50432]


def test_experts() -> None:
    mixed = {"moe_experts": 8, "moe_topk": 2, "moe_ffn_hidden": 512, "moe_shared_ffn_hidden": 1024, "n_dense_layers": 1}
    experts = decoder(**GPT | {"arch": "llama moe"} | mixed).experts
    assert experts is not None
    assert (experts.count, experts.top_k, experts.ffn, experts.shared, experts.dense_layers) == (8, 2, 512, 2, 1)
    row = Row(GPT | {"moe_experts": 4})
    plain = build_model(row).experts  # type: ignore[attr-defined]
    assert (plain.top_k, plain.ffn) == (2, 4096)
    assert "moe_topk 2 (not stated)" in row.assumed


def test_latent_attention_has_the_sizes_of_deepseek() -> None:
    row = Row(GPT | {"arch": "deepseek-v3 (MLA+MoE)", "moe_experts": 8, "n_kv_heads": 4})
    model = build_model(row)
    assert isinstance(model, Transformer) and model.latent is not None
    assert (model.latent.kv_rank, model.latent.q_rank, model.kv_heads) == (512, 1536, 16)
    assert any(line.startswith("latent attention") for line in row.assumed)


def test_norms_of_queries_and_keys_are_read_from_notes() -> None:
    row = Row(GPT | {"plan_note": "test gpt3_mcore_te_tp4_pp1_qk_layernorm"})
    model = build_model(row)
    assert isinstance(model, Transformer) and model.qk_norm
    assert "from plan_note: 'qk layernorm' taken as qk_norm" in row.assumed


def test_other_families() -> None:
    bert = build_model(Row({"arch": "bert", "n_layers": 2, "hidden": 256, "n_heads": 4, "seq_len": 1024}))
    assert isinstance(bert, Bert) and bert.max_positions == 1024
    eager = build_model(Row({"arch": "bert", "n_layers": 2, "hidden": 256, "attention_kernel": "unfused"}))
    assert isinstance(eager, Bert) and eager.attention == "unfused" != bert.attention
    t5 = build_model(Row({"model": "T5-3B", "arch": "t5 encoder-decoder"}))
    assert isinstance(t5, T5) and t5.head_dim == 128
    vit = build_model(Row({"arch": "vit", "n_layers": 2, "hidden": 192, "n_heads": 3, "seq_len": 577}))
    assert isinstance(vit, VisionTransformer) and vit.image == 384  # 24 * 24 patches of 16, and the class token
    assert build_model(Row({"model": "resnet-152", "arch": "resnet"})).name == "resnet-152"


def test_a_number_of_parameters_is_the_last_resort() -> None:
    row = Row({"model": "our GPT 25B", "arch": "gpt"})
    model = build_model(row)
    assert isinstance(model, Transformer)
    assert 12 * model.layers * model.hidden**2 == pytest.approx(25e9, rel=0.05)
    assert any("guessed from 25 billion parameters" in line for line in row.assumed)
    for fields in ({"model": "ours", "arch": "gpt"}, {"arch": "mamba"}, {"arch": "unet"}):
        with pytest.raises(Skip, match=r"not stated|not expressed|cannot state"):
            build_model(Row(fields))
