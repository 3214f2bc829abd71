"""A small script of Megatron-LM, written by hand from its documentation, means what it means there."""

from dataclasses import replace
from typing import Any

import pytest
from small_requests import TRAINING, check_meaning, request

from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.interchange.megatron import MEGATRON
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

FILE = """#!/bin/bash
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
MEANT: dict[str, Any] = {
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
}


@pytest.mark.parametrize("name", ["megatron"])
def test_a_file_written_by_hand(name: str) -> None:
    check_meaning(name, FILE, MEANT)


def test_rounds_longer_than_the_pipeline_are_said_and_read() -> None:
    """3 microbatches over 2 ranks are one round of 3; Megatron-LM's rounds have 2 unless it is told."""
    key = "--microbatch-group-size-per-virtual-pipeline-stage"
    layout: dict[str, Any] = {"pipeline": 2, "chunks": 2, "microbatch": 4, "schedule": "interleaved"}
    assert key not in MEGATRON.to_text(request("gpt", replace(TRAINING, global_batch=16), **layout))
    text = MEGATRON.to_text(request("gpt", replace(TRAINING, global_batch=12), **layout))
    assert f"    {key} 3\n" in text and MEGATRON.read(text.encode())["plan.chunks"] == 2
    for other in (text.replace(f"{key} 3", f"{key} 2"), text.replace(f"    {key} 3\n", "")):
        with pytest.raises(ScenarioError, match=f"{key}: is 3 with 3 microbatches, met 2"):
            MEGATRON.read(other.encode())
