"""Small files of each trainer, written by hand from its documentation, mean what they mean there."""

from typing import Any

import pytest

from meshwise.scenarios.interchange.facts import PLAN
from meshwise.scenarios.interchange.targets import TARGETS
from meshwise.strategies.plan.offloading import NOTHING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

TORCHTITAN = """
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
MEGATRON = """#!/bin/bash
# a comment
NNODES=4
NPROC_PER_NODE=8
ARGUMENTS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --pipeline-model-parallel-layout 'Et|ttt|tt|ttL'
    --sequence-parallel
    --use-distributed-optimizer
    --num-distributed-optimizer-instances 4
    --overlap-grad-reduce
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers 1
    --micro-batch-size 2
    --global-batch-size 128
    --num-layers 8
    --hidden-size 1024
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --ffn-hidden-size 4096
    --vocab-size 32000
    --seq-length 2048
    --max-position-embeddings 4096
    --attention-backend flash
    --bf16
)
"""
DEEPSPEED = """{
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
ACCELERATE = """# script: per_device_train_batch_size = 2
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
NANOTRON = """
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
EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "torchtitan": (
        TORCHTITAN,
        {
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
            "plan.offload": NOTHING,  # enable_cpu_offload is false
            "plan.expert": 1,
            "training.global_batch": 64,  # local_batch_size * data = 8 * 8: one pass of the pipeline
            "training.sequence": 8192,
            "training.precision": "bf16",  # mixed_precision_param is bfloat16
        },
    ),
    "megatron": (
        MEGATRON,
        {
            "plan.data": 4 * 8 // (2 * 2),  # world size over the other degrees
            "plan.tensor": 2,
            "plan.pipeline": 2,
            "plan.chunks": 2,  # 4 stages of the layout over 2 ranks
            "plan.stages": (1, 3, 2, 2),
            "plan.schedule": "interleaved",
            "plan.sequence_parallel": True,
            "plan.zero": 1,
            "plan.zero_shards": 8 // 4,  # 4 instances of the optimizer over 8 data ranks
            "plan.overlap_gradients": True,
            "plan.scatter_gather": True,  # --no-scatter-gather-tensors-in-pipeline is not there
            "plan.recompute": FirstLayers(Recompute.FULL, 1),  # block: the first layer of each stage
            "plan.microbatch": 2,
            "plan.context": 1,
            "plan.expert": 1,
            "training.global_batch": 128,
            "training.precision": "bf16",
            "training.gradient_precision": "fp32",  # --bf16 implies it
            "training.optimizer": "adamw",  # --optimizer adam decouples weight decay
            "training.gradient_clipping": True,  # --clip-grad is 1.0
            "training.sequence": 2048,
            "model.layers": 8,
            "model.kv_heads": 4,
            "model.kv_channels": 1024 // 16,
            "model.max_positions": 4096,
            "model.dropout": True,  # both probabilities are 0.1
            "model.ffn_kind": "gelu",
            "model.tied_embeddings": True,
            "model.positions": "learned",
            "model.norm": "layer",
            "model.biases": "all",
            "model.experts": None,
        },
    ),
    "deepspeed": (
        DEEPSPEED,
        {
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
        },
    ),
    "accelerate": (
        ACCELERATE,
        {
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
        },
    ),
    "nanotron": (
        NANOTRON,
        {
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
        },
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_written_by_hand(name: str) -> None:
    text, expected = EXPECTED[name]
    facts = TARGETS[name].read(text.encode())
    assert {field: facts[field] for field in expected} == expected
    assert set(facts) - set(expected) - set(PLAN) <= {
        each for each in facts if each.startswith(("training.", "model."))
    }


def test_every_trainer_has_such_a_file() -> None:
    assert set(EXPECTED) == set(TARGETS)
