"""Reads exported scripts with Megatron-LM's own parser; run with an interpreter that has megatron-core.

``read_megatron.py CASES SOURCE``: a JSON list of ``{"file", "ranks"}``, and a folder with Megatron-LM's ``megatron``.
Each script is run by bash as its first line says, with a ``torchrun`` that passes its arguments to `parse_args` and
`validate_args` of ``megatron/training/arguments.py`` in a process with the ranks of the run. Only what asks a GPU is
replaced: its capability, and the presence of Transformer Engine's fused rotary positions.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

LAUNCHER = """#!/bin/bash
exec "{python}" "{file}" parse "{source}" "$@"
"""


def stub_devices() -> None:
    """Answer as a Hopper GPU would."""
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 8


def parse(source: str, words: list[str]) -> dict:
    """Return the facts of the arguments that ``torchrun`` was given."""
    sys.path.insert(0, source)
    stub_devices()
    start = words.index("pretrain_gpt.py")
    launch = dict(zip(words[:start:2], words[1:start:2], strict=True))
    ranks = int(launch["--nnodes"]) * int(launch["--nproc-per-node"])
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    sys.argv = words[start:]
    import megatron

    training = ModuleType("megatron.training")  # its own imports all of training, with Triton
    training.__path__ = [f"{source}/megatron/training"]
    for name in ("get_args", "get_timers", "get_adlr_autoresume", "get_num_microbatches", "get_wandb_writer"):
        setattr(training, name, None)
    sys.modules[training.__name__] = megatron.training = training
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()  # Transformer Engine's
    args = validate_args(parse_args(), {})
    if spec := args.spec:
        assert (Path(os.environ["PYTHONPATH"].split(":")[0]) / f"{spec[0]}.py").exists()
    config = core_transformer_config_from_args(args)
    layout = config.pipeline_model_parallel_layout
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if layout is None:
        stages = [args.num_layers // (args.pipeline_model_parallel_size * chunks)] * (
            args.pipeline_model_parallel_size * chunks
        )
    else:
        rows = layout.layout
        stages = [
            sum(layer.name == "decoder" for layer in rows[rank][chunk])
            for chunk in range(chunks)
            for rank in range(args.pipeline_model_parallel_size)
        ]
    zero = int(args.use_distributed_optimizer)
    if args.use_megatron_fsdp:
        zero = {"optim_grads": 2, "optim_grads_params": 3}[args.data_parallel_sharding_strategy]
    return {
        "data": args.data_parallel_size,
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "attention": args.cp_comm_type[0],
        "expert": args.expert_model_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "stages": stages,
        "chunks": chunks,
        "zero": 3 if args.use_torch_fsdp2 else zero,
        "instances": args.num_distributed_optimizer_instances,
        "reshard_after_forward": not args.use_torch_fsdp2 or args.torch_fsdp2_reshard_after_forward,
        "overlap_gradients": args.overlap_grad_reduce or args.use_torch_fsdp2,
        "overlap_tensor": args.tp_comm_overlap,
        "scatter_gather": args.scatter_gather_tensors_in_pipeline,
        "microbatch": args.micro_batch_size,
        "microbatches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        "granularity": config.recompute_granularity,
        "method": config.recompute_method,
        "recompute_layers": config.recompute_num_layers,
        "modules": config.recompute_modules,
        "spec": bool(args.spec),
        "offload": args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0,
        "sequence": args.seq_length,
        "precision": str(args.params_dtype).removeprefix("torch."),
        "gradients": "fp32" if args.accumulate_allreduce_grads_in_fp32 else "same",
        "clipping": args.clip_grad,
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups,
        "ffn": config.ffn_hidden_size,
        "norm": config.normalization,
        "norm_epsilon": config.layernorm_epsilon,
        "deviation": config.init_method_std,
        "rotary_base": args.rotary_base,
        "vocab": args.padded_vocab_size or args.vocab_size,
        "experts": config.num_moe_experts,
        "rate": args.lr,
        "iterations": args.train_iters,
        "checkpoints": args.save,
        "data_path": args.data_path,
        "tokenizer": args.tokenizer_model,
    }


def main() -> None:
    """Print the facts of every case."""
    if sys.argv[1] == "parse":
        print("FACTS", json.dumps(parse(sys.argv[2], sys.argv[3:])), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder, "torchrun")
        launcher.write_text(LAUNCHER.format(python=sys.executable, file=Path(__file__).resolve(), source=sys.argv[2]))
        launcher.chmod(0o755)
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
        for case in json.loads(Path(sys.argv[1]).read_text()):
            file = Path(case["file"])
            command = file.read_text().split("\n", 1)[0].removeprefix("# ")
            done = subprocess.run(
                ["bash", "-c", command], cwd=file.parent, env=environment, capture_output=True, text=True
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS")]
            failure = json.dumps({"error": f"{command}: {done.stderr[-1500:]}"})
            print(lines[-1] if done.returncode == 0 and lines else f"FACTS {failure}", flush=True)


if __name__ == "__main__":
    main()
