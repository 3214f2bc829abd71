"""Precisions of rows, in the words of their publishers."""

from .test_scenario import scenario


def test_precision_words() -> None:
    words = {
        "amp_bf16": "bf16", "bfloat16": "bf16", "bf16 compute, fp32 weights": "bf16", "FP8-CS": "fp8", "MXFP8": "fp8",
        "float16": "fp16", "TF32": "tf32", "fp32": "fp32", "something": "bf16", "mixed precision": "fp16",
    }  # fmt: skip
    for word, precision in words.items():
        assert scenario({"precision": word}).problem.training.precision == precision, word
