"""A small configuration of nanotron, written by hand from its documentation, means what it means there."""

from typing import Any

import pytest
from small_requests import check_meaning

from meshwise.strategies.plan.recomputation import Recompute

FILE = """
parallelism: {dp: 2, pp: 2, tp: 4, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, recompute_layer: true}
tokens: {sequence_length: 4096, micro_batch_size: 2, batch_accumulation_per_replica: 8, train_steps: 10}
optimizer:
  zero_stage: 1
  clip_grad: 1.0
  accumulate_grad_in_fp32: true
  optimizer_factory: {name: adamW, adam_eps: 1e-8}
model:
  dtype: bfloat16
  model_config:
    is_qwen2_config: true
    hidden_act: silu
    hidden_size: 64
    intermediate_size: 256
    num_attention_heads: 8
    num_key_value_heads: 4
    num_hidden_layers: 8
    max_position_embeddings: 4096
    tie_word_embeddings: false
    vocab_size: 256
"""
MEANT: dict[str, Any] = {
    "plan.data": 2,
    "plan.pipeline": 2,
    "plan.tensor": 4,
    "plan.schedule": "1f1b",
    "plan.sequence_parallel": True,  # tp_mode REDUCE_SCATTER
    "plan.recompute": Recompute.FULL,
    "plan.zero": 1,
    "plan.microbatch": 2,
    # a layer costs 4 * 64^2 + 3 * 256 * 64 = 65,536, the head 256 * 64 = 16,384: half of all is 270,336, which
    # four layers (262,144) do not pass, but five do
    "plan.stages": (5, 3),
    "training.global_batch": 2 * 8 * 2,
    "training.sequence": 4096,
    "training.precision": "bf16",
    "training.gradient_precision": "fp32",
    "training.gradient_clipping": True,
    "model.kv_heads": 4,
    "model.kv_channels": 64 // 8,
    "model.biases": "none",  # attention_bias is false
}


@pytest.mark.parametrize("name", ["nanotron"])
def test_a_file_written_by_hand(name: str) -> None:
    check_meaning(name, FILE, MEANT)
