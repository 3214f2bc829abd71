"""Precisions of rows, in the words of their publishers."""

from .test_scenario import scenario


def test_states_and_scales_are_read_where_they_are_said() -> None:
    for fields, states in (
        ({}, "fp32"),
        ({"state_precision": "same"}, "same"),
        ({"state_precision": "bf16 moments, fp32 master"}, "bf16"),
        ({"optimizer": "AdamW (bf16 states)"}, "same"),
        ({"optimizer": "AdamW (8-bit)"}, "int8"),
        ({"optimizer": "16-bit AdamW"}, "same"),
        ({"optimizer": "bnb 8-bit AdamW"}, "int8"),
        ({"optimizer": "8-bit Adam", "state_precision": "fp32"}, "fp32"),
    ):
        assert scenario(fields).problem.training.state_precision == states, fields
    for words, scaling in (
        ("float8 rowwise", "row"),
        ("float8 tensorwise", "tensor"),
        ("FP8", None),
        ("bf16", None),
        ("FP8 tensor cores", None),
    ):
        row = {"precision": words, "accelerator": "H100 SXM"}
        assert scenario(row).problem.training.fp8_scaling == scaling, words


def test_precision_words() -> None:
    words = {
        "amp_bf16": "bf16", "bfloat16": "bf16", "bf16 compute, fp32 weights": "bf16", "FP8-CS": "fp8", "MXFP8": "fp8",
        "float16": "fp16", "TF32": "tf32", "fp32": "fp32", "something": "bf16", "mixed precision": "fp16",
    }  # fmt: skip
    for word, precision in words.items():
        assert scenario({"precision": word}).problem.training.precision == precision, word
