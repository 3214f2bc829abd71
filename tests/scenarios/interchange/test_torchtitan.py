"""A small function of torchtitan, written by hand from its documentation, means what it means there."""

from typing import Any

import pytest
from small_requests import check_meaning

from meshwise.strategies.plan.offloading import NO_OFFLOADING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

FILE = """
def laid_out(config: Trainer.Config) -> Trainer.Config:
    config.training.local_batch_size = 8
    config.training.global_batch_size = 64
    config.training.seq_len = 8192
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.data_parallel_shard_degree = 4
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism.context_parallel_degree = 2
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    config.parallelism.pipeline_parallel_microbatch_size = 2
    config.parallelism.module_fqns_per_model_part = [
        ['tok_embeddings', 'layers.0'],
        ['layers.1', 'layers.2'],
        ['layers.3'],
        ['layers.4', 'norm', 'lm_head'],
    ]
    config.activation_checkpoint = FullAC.Config()
    return config
"""
MEANT: dict[str, Any] = {
    "plan.data": 2 * 4,  # ParallelDims: batch = dp_replicate * dp_shard
    "plan.zero": 3,  # fully_shard shards parameters
    "plan.zero_shards": 4,  # over dp_shard alone: HSDP
    "plan.reshard_after_forward": False,  # policy "default" with a pipeline
    "plan.tensor": 2,
    "plan.sequence_parallel": True,  # enable_sequence_parallel is the default
    "plan.context": 2,
    "plan.attention": Attention.ALL_GATHER,  # flex_cp_allgather
    "plan.pipeline": 2,
    "plan.schedule": "interleaved",
    "plan.chunks": 2,  # 4 model parts over 2 ranks
    "plan.stages": (1, 2, 1, 1),
    "plan.microbatch": 2,
    "plan.recompute": Recompute.FULL,
    "plan.offload": NO_OFFLOADING,  # enable_cpu_offload is false
    "plan.expert": 1,
    "training.global_batch": 64,  # local_batch_size * data = 8 * 8: one pass of the pipeline
    "training.sequence": 8192,
    "training.precision": "bf16",  # mixed_precision_param is bfloat16
}


@pytest.mark.parametrize("name", ["torchtitan"])
def test_a_file_written_by_hand(name: str) -> None:
    check_meaning(name, FILE, MEANT)
