"""A small configuration of DeepSpeed, written by hand from its documentation, means what it means there."""

from typing import Any

import pytest
from small_requests import check_meaning

from meshwise.strategies.plan.offloading import Offloading

FILE = """{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "data_types": {"grad_accum_dtype": "fp32"},
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  "tensor_parallel": {"autotp_size": 4},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25},
    "offload_param": {"device": "cpu"}}
}
"""
MEANT: dict[str, Any] = {
    "plan.data": 64 // (2 * 4),  # train_batch_size = micro batch * steps * data ranks
    "plan.microbatch": 2,
    "plan.tensor": 4,
    "plan.zero": 3,
    "plan.overlap_gradients": True,  # overlap_comm is true with stage 3
    "plan.offload": Offloading(optimizer=(0.25,), parameters=(1.0,)),
    "plan.context": 1,
    "plan.pipeline": 1,
    "training.global_batch": 64,
    "training.precision": "bf16",
    "training.gradient_precision": "fp32",
    "training.optimizer": "adamw",
    "training.gradient_clipping": True,
}


@pytest.mark.parametrize("name", ["deepspeed"])
def test_a_file_written_by_hand(name: str) -> None:
    check_meaning(name, FILE, MEANT)
