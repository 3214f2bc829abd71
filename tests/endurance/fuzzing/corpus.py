"""Valid inputs of every parser: what the mutations begin with."""

import json
from functools import cache
from typing import Any

from .tree import Tree, tree_of

_DECODER = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 512, "vocab_size": 1000},
    _DECODER | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"},
    _DECODER | {"model_type": "mistral", "sliding_window": 128},
    _DECODER | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    _DECODER | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    _DECODER
    | {"model_type": "deepseek_v3", "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
    | {"v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"first_k_dense_replace": 1},
    _DECODER | {"model_type": "bert", "hidden_act": "gelu", "tie_word_embeddings": True, "attention_dropout": 0.1},
    {"model_type": "t5", "num_layers": 2, "d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "vocab_size": 100},
    {"model_type": "vit", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
     "id2label": {"0": "cat", "1": "dog"}},
    {"model_type": "resnet", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]},
    {"_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4,
     "block_out_channels": [32, 64], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
     "up_block_types": ["DownBlock2D", "CrossAttnUpBlock2D"], "layers_per_block": 2, "cross_attention_dim": 64},
)  # fmt: skip
"""Hugging Face configurations, one of each kind of family; sizes are small."""
ROW = {
    "row_id": "a-1", "source_id": "a", "model": "gpt", "arch": "gpt", "n_layers": 8, "hidden": 1024, "n_heads": 16,
    "ffn_hidden": 4096, "vocab": 51200, "seq_len": 1024, "precision": "bf16", "framework": "Megatron-LM",
    "accelerator": "A100 SXM", "accel_mem_gb": 80, "n_devices": 8, "devices_per_node": 8, "dp": 2, "tp": 2, "pp": 2,
    "zero_stage": 1, "recompute": "selective (attention core)", "micro_batch": 1, "grad_accum": 4, "global_batch": 8,
    "schedule": "1F1B", "offload": "none", "status": "ok", "step_time_s": 1.1, "peak_mem_gib": 20.5,
}  # fmt: skip
ROWS = (
    ROW,
    ROW | {"schedule": "interleaved, vpp 2", "vpp": 2, "recompute": "full", "sequence_parallel": "on"},
    ROW
    | {"model": "llama2-7b", "tp": 1, "pp": 1, "dp": 8, "zero_stage": 3, "framework": "FSDP", "mem_note": "peak 30 GB"},
    ROW | {"n_experts": 8, "moe_top_k": 2, "ep": 2, "seq_len": "4k", "offload": "optimizer 50%", "status": "OOM"},
)
_TIMED = {"source_id": "a", "source_repo": "a/b", "accelerator": "A100 SXM", "dtype": "bf16", "time_us": 1000.0}
KERNELS = (
    _TIMED | {"kernel": "gemm", "m": 4096, "n": 4096, "k": 4096, "pass": "dgrad", "layout": "nt", "tp": 1},
    _TIMED | {"kernel": "grouped_gemm", "groups": 8, "m": 512, "n": 1024, "k": 1024, "accumulate": True,
              "note": "output fp32"},
    _TIMED | {"kernel": "attention_fwd", "batch": 4, "heads": 32, "kv_heads": 32, "seq_q": 2048, "seq_kv": 2048,
              "head_dim": 128, "causal": True, "impl": "flash-attn 2"},
    _TIMED | {"kernel": "layernorm", "elements": 100_000_000, "impl": "fused"},
    _TIMED | {"kernel": "optimizer_step", "params": 100_000_000, "impl": "fused", "in_a_row": 10},
)  # fmt: skip
_COLLECTIVE = {
    "source_id": "a", "collective": "all_reduce", "accelerator": "H100 SXM", "intra_node_link": "NVLink4/NVSwitch",
    "inter_node_link": "", "n_ranks": 8, "n_nodes": 1, "size_bytes": 2**28, "time_us": 1200.5,
    "algo": "Ring", "tool": "nccl-tests",
}  # fmt: skip
COLLECTIVES = (
    _COLLECTIVE,
    _COLLECTIVE | {"n_ranks": 16, "n_nodes": 2, "inter_node_link": "EFA v2, 32x100 Gb/s per node", "algo": "NVLS"},
    {key: value for key, value in _COLLECTIVE.items() if key != "time_us"}
    | {"busbw_GBps": 300, "collective": "all_gather"},
)
_MACHINE = {"source_id": "here", "source_repo": "meshwise calibrate", "accelerator": "H200 SXM", "machine": "box",
            "accel_mem_gb": 141, "host_mem_GiB": 1024, "cores": 64, "dtype": "bf16", "time_us": 200.0}  # fmt: skip
MACHINE = tuple(
    _MACHINE | fields
    for fields in (
        {"kernel": "gemm", "m": 4096, "n": 4096, "k": 4096},
        {"kernel": "gemm", "m": 1024, "n": 4096, "k": 8192},
        {"kernel": "layernorm", "elements": 100_000_000, "impl": "fused"},
        {"kernel": "copy_h2d", "impl": "pinned", "bytes": 2**26},
        {"collective": "all_reduce", "n_ranks": 8, "size_bytes": 2**26},
    )
)
SCHEDULES = (
    "0F0 0B0",
    "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
    "0F0 3F0 3B0 0B0\n1F0 2F0 2I0 1I0 2W0 1W0",
    "0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2",
    "1f1b",
    "interleaved",
)
PLANNED = """
model: {transformer: {layers: 8, hidden: 64, heads: 8, ffn: 128, vocab: 128}}
training: {global_batch: 16, sequence: 64, precision: fp32}
cluster: {preset: local-cpu, nodes: 1, devices_per_node: 8}
"""
PLANS = (
    "{data: 2, tensor: 2, pipeline: 2, microbatch: 2, schedule: 1f1b, zero: 1, recompute: full}",
    "{data: 4, pipeline: 2, microbatch: [1, 3, 3, 1], schedule: interleaved, chunks: 2, recompute: {full: 1}}",
    "{data: 8, zero: 3, zero_shards: 4, reshard_after_forward: false, overlap_gradients: false, offload: [optimizer]}",
    "{context: 2, attention: ulysses, data: 4, order: [pipeline, data, context, tensor], stages: even}",
    "{tensor: 4, data: 2, sequence_parallel: true, overlap_tensor: true, recompute: {operators: [attention, up]}}",
    "{pipeline: 8, microbatch: 4, stages: [1, 1, 1, 1, 1, 1, 1, 1], schedule: zb1p, offload: {optimizer: 0.5}}",
    '{pipeline: 2, data: 4, microbatch: 4, schedule: "0F0 0B0\\n1F0 1B0"}',
    "{data: 8, placement: [7, 6, 5, 4, 3, 2, 1, 0], gradient_reduction: parameter_server}",
)
QUANTITIES = ("80 GiB", "400 Gb/s", "2 us", "312 TFLOP/s", "1.5e3 ms", ".5 h")
QUESTIONS = ("tensor=8,pipeline=2", "tensor=8, recompute={full: 2}", "stages=[2, 2], schedule=1f1b", "zero=3")


@cache
def scenarios() -> tuple[str, ...]:
    """Return the scenarios of the library that refer to no other file and are small, as text."""
    from meshwise.scenarios.files.library import find_root, list_names

    texts = [(find_root() / f"{name}.yaml").read_text("utf-8") for name in list_names()]
    return tuple(text for text in texts if "graph: ./" not in text and len(text) < 4000)


@cache
def plans() -> tuple[str, ...]:
    """Return plans of `PLANNED` as users write them, and complete ones as documents."""
    from meshwise.scenarios.files.reader import parse_document
    from meshwise.scenarios.loader import read_scenario

    texts = [f"{PLANNED}plan: {plan}\n" for plan in PLANS]
    whole = [read_scenario(parse_document(text.encode())).choose_plan().to_json() for text in texts]
    return (*map(json.dumps, whole), *PLANS)


@cache
def clusters() -> tuple[str, ...]:
    """Return cluster files of machines of the catalogue that are small, and of one that is mixed."""
    from meshwise.scenarios.inputs.cluster_document import build_cluster_document
    from meshwise.simulator.catalog import cluster, cluster_names
    from meshwise.simulator.machine.cluster import Cluster

    machines = [cluster(name) for name in cluster_names()]
    small = [machine for machine in machines if machine.num_devices <= 64][::3]
    mixed = Cluster("mixed", (*small[0].nodes, *small[-1].nodes))
    return tuple(json.dumps(build_cluster_document(machine)) for machine in (*small, mixed))


@cache
def graphs() -> tuple[str, ...]:
    """Return graph files: that of the library, and a small transformer's."""
    from meshwise.scenarios.files.library import find_root
    from meshwise.scenarios.inputs.graph_file import dump_graph
    from meshwise.simulator.models.hugging_face import spec_from_config
    from meshwise.simulator.models.model import build

    return (find_root() / "operators" / "mlp.json").read_text("utf-8"), dump_graph(
        build(spec_from_config(CONFIGS[0]), 64, "fp32")
    )


def trees(texts: tuple[str, ...]) -> tuple[Tree, ...]:
    """Return YAML texts as trees."""
    from meshwise.scenarios.files.reader import parse_document

    return tuple(tree_of(parse_document(text.encode()).data) for text in texts)
