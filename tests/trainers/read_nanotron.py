"""Reads exported files with nanotron's own configuration classes; run with an interpreter that has its packages.

``read_nanotron.py CASES SOURCE``: a JSON list of ``{"file"}``, and a folder with nanotron's ``nanotron``. Files go
through ``get_config_from_file``. Stages are counted here, by the rule of `build_model` (``nanotron/models/base.py``) on
the costs that nanotron's model states. Kernels that need a GPU are replaced by empty modules, which the parser does not
use.
"""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

KERNELS = ("flash_attn", "ring_flash_attn", "grouped_gemm", "triton", "functorch", "torchtyping", "lighteval", "einops")


class EmptyFinder:
    """Finds an empty module for kernels that are not installed."""

    def find_spec(self, name, path=None, target=None):
        """Return the specification of an empty module for a kernel."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in KERNELS else None

    def create_module(self, spec):
        """Return a module every name of which is a mock."""
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: "9.0.0" if name == "__version__" else MagicMock()
        return module

    def exec_module(self, module):
        """Run nothing."""


def count_layers(config) -> list[int] | None:
    """Return the layers of every rank, by the loop of ``build_model`` over the costs that nanotron's model has."""
    from nanotron.models.qwen import Qwen2Model

    model = config.model.model_config
    costs = list(Qwen2Model.get_block_compute_costs(type("Model", (), {"config": model})()).values())
    layer_cost, head_cost = costs[0], costs[-1]
    blocks = [0, *[layer_cost] * model.num_hidden_layers, 0, head_cost, 0, 0]
    ranks, total = config.parallelism.pp, sum(blocks)
    thresholds = [total * (rank + 1) / ranks for rank in range(ranks)]
    target, spent, layers = 0, 0, [0] * ranks
    for index, cost in enumerate(blocks):
        layers[min(target, ranks - 1)] += 1 <= index <= model.num_hidden_layers
        spent += cost
        if target < ranks and spent > thresholds[target]:
            target += 1
    return layers


def collect(config) -> dict:
    """Return the facts of a configuration."""
    parallelism, model, tokens, optimizer = (
        config.parallelism,
        config.model.model_config,
        config.tokens,
        config.optimizer,
    )
    return {
        "data": parallelism.dp,
        "pipeline": parallelism.pp,
        "tensor": parallelism.tp,
        "context": parallelism.context_parallel_size,
        "expert": parallelism.expert_parallel_size,
        "engine": type(parallelism.pp_engine).__name__,
        "sequence_parallel": parallelism.tp_mode.name == "REDUCE_SCATTER",
        "overlap_tensor": parallelism.tp_linear_async_communication,
        "recompute": parallelism.recompute_layer,
        "zero": optimizer.zero_stage,
        "microbatch": tokens.micro_batch_size,
        "microbatches": tokens.batch_accumulation_per_replica,
        "batch": config.global_batch_size,
        "sequence": tokens.sequence_length,
        "precision": str(config.model.dtype).removeprefix("torch."),
        "clipping": optimizer.clip_grad,
        "stages": count_layers(config),
        "class": type(model).__name__,
        "layers": model.num_hidden_layers,
        "hidden": model.hidden_size,
        "vocab": model.vocab_size,
        "kv_heads": model.num_key_value_heads,
        "rotary_base": model.rope_theta,
        "norm_epsilon": model.rms_norm_eps,
        "deviation": config.model.init_method.std,
        "rate": optimizer.learning_rate_scheduler.learning_rate,
        "iterations": tokens.train_steps,
        "checkpoints": str(config.checkpoints.checkpoints_path),
        "tokenizer": config.tokenizer.tokenizer_name_or_path,
        "data_path": config.data_stages[0].data.dataset.hf_dataset_or_datasets,
    }


def main() -> None:
    """Print the facts of every case."""
    sys.meta_path.append(EmptyFinder())
    sys.path.insert(0, sys.argv[2])
    from nanotron.config import get_config_from_file

    for case in json.loads(Path(sys.argv[1]).read_text()):
        print("FACTS", json.dumps(collect(get_config_from_file(case["file"]))), flush=True)


if __name__ == "__main__":
    main()
