"""Reads exported modules with torchtitan's own parser, and takes steps of them; run with torchtitan's interpreter.

``read_torchtitan.py CASES``: a JSON list of ``{"file", "ranks", "steps"}``. For each the facts that torchtitan's
objects hold are printed on a line of JSON. Steps run on CPUs by torchtitan's fake back end, as one rank of all; those
of pipelines, whose stages tell each other shapes, on a process a rank with gloo. Replaced are the device, the kernel of
attention (FlexAttention has no backward on CPUs), the tokenizer and the data, and what released torch 2.13 lacks.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

MEMORY = {
    "get_device_name": "CPU",
    "get_device_properties": SimpleNamespace(total_memory=1, name="CPU"),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}
"""What torchtitan asks of a device's module and ``torch.cpu`` does not have."""


def replace_devices() -> None:
    """Let torchtitan, imported afterwards, take the CPU for its device."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    for name, value in MEMORY.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)


def build_data():
    """Return configurations of no tokenizer and of random tokens."""
    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):
        """No tokenizer: data are tokens already."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **kwargs):
            super().__init__()

        def encode(self, *args, **kwargs):
            return []

        def decode(self, *args, **kwargs):
            return ""

        def get_vocab_size(self):
            return 0

    class RandomData(BaseDataLoader):
        """Random tokens of one shape."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            vocabulary: int = 64

        def __init__(self, config, *, seq_len, local_batch_size, **kwargs):
            self.shape, self.vocabulary = (local_batch_size, seq_len), config.vocabulary

        def __iter__(self):
            while True:
                tokens, labels = torch.randint(0, self.vocabulary, (2, *self.shape))
                yield (
                    {"input": tokens, "positions": torch.arange(self.shape[1]).expand(self.shape).contiguous()},
                    labels,
                )

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    return Tokenizer.Config(), RandomData.Config()


def parse(file: Path):
    """Return the configuration of a module, as ``-m torchtitan.train --module STEM --config train`` parses it."""
    from torchtitan.config import ConfigManager

    sys.path.insert(0, str(file.parent))
    return ConfigManager().parse_args(["--module", file.stem, "--config", "train"])


def collect(config, ranks: int) -> dict:
    """Return the facts of a plan and a model that torchtitan's objects hold."""
    import torch
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
    from torchtitan.models.common import Linear
    from torchtitan.models.common.feed_forward import FeedForward

    parallelism, training, spec = config.parallelism, config.training, config.model_spec
    dims = ParallelDims.from_config(parallelism, ranks)
    data = dims.dp_replicate * dims.dp_shard
    accumulations = training.global_batch_size // (training.local_batch_size * data)
    size = parallelism.pipeline_parallel_microbatch_size if dims.pp_enabled else training.local_batch_size
    parts = parallelism.module_fqns_per_model_part or [[f"layers.{index}" for index in range(len(spec.model.layers))]]
    keeps = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, dims.pp_enabled)
    policy = config.activation_checkpoint
    kinds = (FeedForward.Config, Linear.Config)
    names = {type(part).__qualname__ for kind in kinds for _, part, _, _ in spec.traverse(kind)}
    recompute = "none" if policy is None else f"first {policy.layers}" if hasattr(policy, "layers") else "full"
    assert policy is None or isinstance(policy, FullAC.Config)
    first = spec.model.layers[0]
    experts = first.moe.num_experts if first.moe else 0
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    return {
        "data": data,
        "shards": dims.dp_shard,
        "tensor": dims.tp,
        "sequence_parallel": dims.tp > 1 and parallelism.enable_sequence_parallel,
        "context": dims.cp,
        "pipeline": dims.pp,
        "expert": dims.ep,
        "schedule": parallelism.pipeline_parallel_schedule if dims.pp_enabled else None,
        "stages": [sum(name.startswith("layers.") for name in part) for part in parts],
        "zero": 3 if dims.fsdp_enabled and dims.dp_shard * dims.cp > 1 else 0,
        "reshard_after_forward": keeps if dims.dp_shard * dims.cp > 1 else True,
        "microbatch": size,
        "microbatches": accumulations * training.local_batch_size // size,
        "recompute": "activation" if "RecomputedFeedForward.Config" in names else recompute,
        "offload": training.enable_cpu_offload,
        "sequence": training.seq_len,
        "precision": "fp8" if any("Float8" in name for name in names) else training.mixed_precision_param,
        "async_tensor": config.compile.enable_async_tensor_parallel,
        "clipping": training.max_norm < 1e30,
        "parameters": sum(parameter.numel() for parameter in set(model.parameters())),
        "experts": experts,
        "rotary_base": first.attention.rope.theta,
        "norm_epsilon": first.attention_norm.eps,
        "checkpoints": config.checkpoint.folder,
        "rate": config.optimizer.param_groups[0].optimizer_kwargs["lr"],
    }


def adapt_step(schedule):
    """Return a schedule's ``step`` with microbatches as arguments, which torch 2.13 has under a name of its own."""

    def run_microbatches(*, arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs, return_outputs):
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)

    return run_microbatches


def step(config, steps: int) -> list[float]:
    """Return the loss of every step of a run on the fake back end, by the trainer's own ``train_step``.

    Released torch 2.13 lacks what torchtitan 0.3.0 needs for its default, ``spmd_types`` (its own debug model fails
    there too), so the steps use ``full_dtensor``, which shards over the same mesh.
    """
    import torch
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    for _, _, parent, name in list(config.model_spec.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.parallelism.spmd_backend = "full_dtensor"
    config.training.disable_cuda_graphs, config.training.steps = True, steps
    config.checkpoint.enable = False
    config.comm.mode = "default" if config.parallelism.pipeline_parallel_degree > 1 else "fake_backend"
    config.debug.enable_structured_logging = False
    config.tokenizer, config.dataloader = build_data()
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)
    if not hasattr(torch.distributed, "set_timeout"):  # of torch 2.14
        torch.distributed.set_timeout = lambda *_: None
    trainer = config.build()
    if trainer.parallel_dims.pp_enabled:
        trainer.pp_schedule.step = adapt_step(trainer.pp_schedule)
    losses, log = [], trainer.metrics_processor.log
    trainer.metrics_processor.should_log = lambda step: True

    def keep(step, loss, *args, **options):
        losses.append(float(loss))
        log(step, loss, *args, **options)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    return losses


def main() -> None:
    """Print the facts of every case; steps of each run in a process of its own, for a process has one world."""
    replace_devices()
    if sys.argv[1] == "step":
        file, ranks, steps = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            os.environ |= {"NGPU": ranks, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks}
        print("STEPS", json.dumps(step(parse(file), steps)))
        return
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            facts = collect(parse(Path(case["file"])), case["ranks"])
        except Exception as error:
            print("FACTS", json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        if case["steps"]:
            start = [sys.executable]
            if facts["pipeline"] > 1:
                start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["ranks"])]
            command = [*start, __file__, "step", case["file"], str(case["ranks"]), str(case["steps"])]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(case["file"]).parent)
            words = done.stdout.splitlines()
            found = [line for line in words if line.startswith("STEPS")]
            if done.returncode == 0 and found:
                facts["steps"] = json.loads(found[-1][6:])
            else:
                facts["error"] = f"steps: {done.stderr[-1500:]}"
        print("FACTS", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
