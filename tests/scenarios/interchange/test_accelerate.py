"""A small configuration of Accelerate, written by hand from its documentation, means what it means there."""

from typing import Any

import pytest
from small_requests import check_meaning

from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

FILE = """# script: per_device_train_batch_size = 2
# script: gradient_accumulation_steps = 4
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
"""
MEANT: dict[str, Any] = {
    "plan.data": 2 * 2,
    "plan.zero": 3,  # FSDP2
    "plan.zero_shards": 2,
    "plan.reshard_after_forward": False,
    "plan.tensor": 2,
    "plan.context": 2,
    "plan.attention": Attention.RING,  # keys and values go round in an all-to-all
    "plan.recompute": Recompute.FULL,
    "plan.microbatch": 2,
    "training.global_batch": 2 * 4 * 4,
    "training.precision": "bf16",
}


@pytest.mark.parametrize("name", ["accelerate"])
def test_a_file_written_by_hand(name: str) -> None:
    check_meaning(name, FILE, MEANT)
