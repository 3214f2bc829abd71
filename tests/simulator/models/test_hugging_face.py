"""Hugging Face configurations: the presets again, and every absurd field one message."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.models.hugging_face import ConfigError, spec_from_config
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_scaling": None,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 27,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
}
T5_11B = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 128,
    "d_ff": 65536,
    "num_layers": 24,
    "num_heads": 128,
    "vocab_size": 32128,
    "dropout_rate": 0.1,
    "relative_attention_num_buckets": 32,
}
BERT = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 1024,
    "image_size": 224,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 16,
    "id2label": {str(i): f"label {i}" for i in range(1000)},
}
RESNET = {
    "model_type": "resnet",
    "depths": [3, 4, 6, 3],
    "hidden_sizes": [256, 512, 1024, 2048],
    "embedding_size": 64,
    "layer_type": "bottleneck",
    "num_labels": 1000,
}
UNET = {
    "_class_name": "UNet2DConditionModel",
    "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 768,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "sample_size": 64,
}
SAME = {
    "llama3-8b": LLAMA,
    "mixtral-8x7b": MIXTRAL,
    "mistral-7b": LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096},
    "qwen3-8b": QWEN3_MOE
    | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8}
    | {"num_hidden_layers": 36},
    "qwen3-30b-a3b": QWEN3_MOE,
    "deepseek-v2-lite": LITE,
    "deepseek-v3": DEEPSEEK_V3,
    "bert-large": BERT,
    "t5-11b": T5_11B,
    "vit-l-16": VIT,
    "resnet-50": RESNET,
    "stable-diffusion-1.5": UNET,
}
# elements of released weights that are no preset
OTHERS: list[tuple[dict[str, Any], int]] = [
    (
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    (  # EleutherAI/pythia-6.9b
        {
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 50432,
        },
        6_857_302_016,
    ),
    (  # Qwen/Qwen2-7B
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    (  # google/gemma-2b
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    (  # google/t5-v1_1-base
        T5_11B
        | {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        247_577_856,
    ),
]


@pytest.mark.parametrize("name", SAME)
def test_a_published_configuration_is_the_preset(name: str) -> None:
    spec: Any = spec_from_config(json.loads(json.dumps(SAME[name])))
    assert replace(spec, name=name) == MODELS[name]


@pytest.mark.parametrize(("config", "parameters"), OTHERS, ids=lambda value: str(value)[:20])
def test_parameters_are_those_of_the_released_weights(config: dict[str, Any], parameters: int) -> None:
    assert build(spec_from_config(config), 1024, "bf16").num_parameters == parameters


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ({}, "model_type", "holds one of gpt2, .*, met nothing"),
        ({"model_type": "lama"}, "model_type", "holds one of llama, .*, met 'lama'"),
        ({"model_type": "deepseek"}, "model_type", "holds one of deepseek_v3, deepseek_v2, .*met 'deepseek'"),
        ({"model_type": ["llama"]}, "model_type", "met a list of 1"),
        ({"_class_name": "UNet2D"}, "_class_name", "holds one of UNet2DConditionModel, met 'UNet2D'"),
        (LLAMA | {"hidden_size": None}, "hidden_size", "holds a whole number from 1 to 10000000, met nothing"),
        (LLAMA | {"hidden_size": True}, "hidden_size", "met true"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size", "met '4096'"),
        (LLAMA | {"hidden_size": 4096.0}, "hidden_size", "met 4096.0"),
        (LLAMA | {"hidden_size": 10**40}, "hidden_size", "met 1000"),
        (
            LLAMA | {"num_hidden_layers": 10**6},
            "num_hidden_layers",
            "holds a whole number from 1 to 10000, met 1000000",
        ),
        (LLAMA | {"num_attention_heads": 7}, "num_attention_heads", r"heads divide hidden\(4096\), met 7"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads", r"kv_heads divide heads\(32\), met 5"),
        (LLAMA | {"hidden_act": "relu"}, "hidden_act", "holds one of silu, swish, met 'relu'"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings", "holds true or false, met 1"),
        (LLAMA | {"attention_bias": True}, "attention_bias", "holds false in the models known here, met true"),
        (LLAMA | {"attention_dropout": 1.5}, "attention_dropout", "holds a number from 0 to below 1, met 1.5"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok", r"top_k is at most count\(8\), met 9"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers", "holds an empty list .*, met a list of 1"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": 61}, "first_k_dense_replace", "dense_layers are fewer than layers"),
        (DEEPSEEK_V3 | {"kv_lora_rank": 0}, "kv_lora_rank", "met 0"),
        (VIT | {"patch_size": 15}, "patch_size", r"patch divides image\(224\), met 15"),
        (RESNET | {"hidden_sizes": [64, 128, 256, 512]}, "hidden_sizes", r"holds \[256, 512, 1024, 2048\]"),
        (RESNET | {"depths": [3] * 1000}, "depths", "holds a list of 1 to 16 whole numbers .*, met a list of 1000"),
        (RESNET | {"depths": [3, "4"]}, "depths", "met another value in it"),
        (UNET | {"up_block_types": UNET["down_block_types"]}, "up_block_types", "words out of"),
        (UNET | {"block_out_channels": [320, 640]}, "block_out_channels", r"one word a level\(2\), met 4"),
    ],
)
def test_an_absurd_field_is_one_message(config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        spec_from_config(config)
    assert caught.value.field == field and str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


HOSTILE: list[Any] = [None, True, False, -1, 0, 1, 8, 64, 10**30, 0.5, 1e300, float("nan"), float("-inf")]
HOSTILE += ["", "gelu", "\x00", "x" * 10_000, [], [1], [1, "a"], [[1]], [0] * 100, {}, {"a": 1}]
VALUES = st.sampled_from(HOSTILE) | st.integers()


@given(st.sampled_from(list(SAME)), st.data())
def test_whatever_a_field_holds_the_answer_is_a_model_or_a_message(name: str, data: st.DataObject) -> None:
    config: dict[str, Any] = dict(SAME[name])
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[field] = data.draw(VALUES)
    try:
        spec = spec_from_config(config)
    except ConfigError as error:
        assert error.field and error.message
        return
    try:
        assert build(spec, 64, "bf16").flops > 0
    except ValueError as error:
        assert "positions" in str(error)


@given(st.sampled_from(list(SAME)), st.data())
def test_a_size_that_is_missing_is_named(name: str, data: st.DataObject) -> None:
    optional = {"num_key_value_heads"} if name == "llama3-8b" else set()
    optional |= {"rope_scaling", "hidden_act", "tie_word_embeddings", "sliding_window", "head_dim", "mlp_only_layers"}
    optional |= {"decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq", "q_lora_rank"}
    optional |= {"n_shared_experts", "dropout_rate", "relative_attention_num_buckets", "max_position_embeddings"}
    optional |= {"type_vocab_size", "image_size", "patch_size", "id2label", "num_labels", "embedding_size"}
    optional |= {"layer_type", "attention_head_dim", "out_channels", "_class_name", "model_type"}
    unread = {"moe_intermediate_size", "num_experts", "num_experts_per_tok"} if name == "qwen3-8b" else set()
    field = data.draw(st.sampled_from(sorted(set(SAME[name]) - optional - unread)))
    with pytest.raises(ConfigError) as caught:
        spec_from_config({key: value for key, value in SAME[name].items() if key != field})
    assert caught.value.field == field and "met nothing" in caught.value.message
