"""Training steps of models of transformers on one GPU, written as rows that ``meshwise accuracy`` reads.

``python -m tests.studies.device_rows FILE.jsonl [--seconds N]``

Nothing of this program is imported, so that what is measured is a trainer as a user writes one: a model of
transformers, autocast to bf16 over fp32 weights or weights in bf16, torch's fused AdamW, and gradient checkpointing
where a row says so. A row has the median of its steps, and the peak of what tensors held, of what the allocator held,
and of what the device held (``torch.cuda.mem_get_info``, one process alone on it). Rows are written as they are
measured; one that runs out of memory says so. Without a GPU there is nothing to measure.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter
from typing import Any

WARM_UP, STEPS, FEWEST = 3, 12, 4
LONGEST = 6.0
"""Seconds that the timed steps of a run take at most, about."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model of transformers, by the names of published rows."""

    name: str
    arch: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    ffn_hidden: int
    vocab: int
    tied_embeddings: bool


LLAMA_1B = Model("Llama-3.2-1B", "llama", 16, 2048, 32, 8, 8192, 128256, True)
LLAMA_3B = Model("Llama-3.2-3B", "llama", 28, 3072, 24, 8, 8192, 128256, True)
QWEN_HALF = Model("Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 4864, 151936, True)
GPT2 = Model("gpt2", "gpt", 12, 768, 12, 12, 3072, 50257, True)
GPT2_LARGE = Model("gpt2-large", "gpt", 36, 1280, 20, 20, 5120, 50257, True)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a model, its batch, and how it is trained."""

    model: Model
    batch: int
    sequence: int
    autocast: bool = True
    recompute: bool = False
    compiled: bool = False
    accumulation: int = 1


TRIALS = (
    Trial(GPT2, 8, 1024),
    Trial(GPT2, 1, 256),
    Trial(GPT2_LARGE, 4, 1024),
    Trial(GPT2_LARGE, 1, 512, accumulation=4),
    Trial(QWEN_HALF, 2, 2048),
    Trial(LLAMA_1B, 2, 2048),
    Trial(LLAMA_1B, 4, 4096, recompute=True),
    Trial(LLAMA_1B, 1, 8192, autocast=False),
    Trial(LLAMA_1B, 2, 4096, autocast=False, recompute=True, accumulation=4),
    Trial(LLAMA_3B, 1, 4096),
    Trial(LLAMA_3B, 2, 4096, recompute=True),
    Trial(LLAMA_3B, 4, 4096, autocast=False, recompute=True),
    Trial(LLAMA_3B, 1, 16384, autocast=False, recompute=True),
    Trial(LLAMA_1B, 2, 2048, compiled=True),
    Trial(LLAMA_3B, 1, 4096, compiled=True),
    Trial(LLAMA_3B, 8, 4096),
)


def measure_rows(trials: Sequence[Trial], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each trial that is begun within the seconds."""
    import torch

    start = monotonic()
    for index, trial in enumerate(trials):
        if monotonic() - start > seconds:
            return
        row = _describe(trial, index, torch)
        try:
            row |= {"status": "ok"} | _measure(trial, torch)
        except torch.cuda.OutOfMemoryError:
            row["status"] = "oom"
        yield row
        gc.collect()
        torch.cuda.empty_cache()


def _describe(trial: Trial, index: int, torch: Any) -> dict[str, Any]:
    model, properties = trial.model, torch.cuda.get_device_properties(0)
    return {
        "row_id": f"device_rows-{index + 1:04d}",
        "source_id": "device_rows",
        "source_kind": "measured by this project, tests/studies/device_rows.py",
        "model": model.name,
        "arch": "gpt" if model.arch == "gpt" else "llama",
        "n_layers": model.n_layers,
        "hidden": model.hidden,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "ffn_hidden": model.ffn_hidden,
        "ffn_type": "gelu" if model.arch == "gpt" else "swiglu",
        "vocab": model.vocab,
        "seq_len": trial.sequence,
        "tied_embeddings": model.tied_embeddings,
        # transformers 5.17 asks scaled_dot_product_attention for cuDNN's kernel on Hopper (its pull request 48163)
        "attention_kernel": "cuDNN" if torch.cuda.get_device_capability() == (9, 0) else "torch SDPA",
        "precision": "bf16 mixed" if trial.autocast else "bf16",
        "optimizer": "AdamW",
        "state_precision": "fp32" if trial.autocast else "same",
        "framework": "HF Accelerate",
        "software": f"torch {torch.__version__}, transformers",
        "accelerator": properties.name,
        "accel_mem_gb": round(properties.total_memory / 1e9, 1),
        "n_devices": 1,
        "devices_per_node": 1,
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "zero_stage": 0,
        "recompute": "full" if trial.recompute else "none",
        "micro_batch": trial.batch,
        "grad_accum": trial.accumulation,
        "global_batch": trial.batch * trial.accumulation,
        "compiled": trial.compiled,
        "gradient_precision": "fp32" if trial.autocast else "bf16",
        "norm_kernel": "eager",
        "tier": "A",
    }


def _measure(trial: Trial, torch: Any) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    model = _build(trial, torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if trial.compiled else model
    tokens = torch.randint(0, trial.model.vocab, (trial.batch, trial.sequence), device="cuda")
    least_free = torch.cuda.mem_get_info()[0]

    def run_step() -> float:
        start = perf_counter()
        for _ in range(trial.accumulation):
            with torch.autocast("cuda", torch.bfloat16, enabled=trial.autocast):
                loss = forward(input_ids=tokens, labels=tokens).loss / trial.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return perf_counter() - start

    for _ in range(WARM_UP):
        run_step()
        least_free = min(least_free, torch.cuda.mem_get_info()[0])
    seconds: list[float] = []
    while len(seconds) < STEPS and (len(seconds) < FEWEST or sum(seconds) < LONGEST):
        seconds.append(run_step())
    total = torch.cuda.mem_get_info()[1]
    return {
        "step_time_s": round(median(seconds), 6),
        "step_times_s": [round(value, 6) for value in seconds],
        "n_params": sum(parameter.numel() for parameter in model.parameters()),
        "peak_mem_gib": round(torch.cuda.max_memory_allocated() / 2**30, 4),
        "peak_mem_kind": "allocated",
        "peak_mem_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 4),
        "peak_mem_device_gib": round((total - least_free) / 2**30, 4),
    }


def _build(trial: Trial, torch: Any) -> Any:
    """Return the model of a trial with random weights on the GPU, in training mode."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

    sizes = trial.model
    if sizes.arch == "gpt":
        config = GPT2Config(
            vocab_size=sizes.vocab,
            n_positions=max(1024, trial.sequence),
            n_embd=sizes.hidden,
            n_layer=sizes.n_layers,
            n_head=sizes.n_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    else:
        config = (LlamaConfig if sizes.arch == "llama" else Qwen2Config)(
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.ffn_hidden,
            num_hidden_layers=sizes.n_layers,
            num_attention_heads=sizes.n_heads,
            num_key_value_heads=sizes.n_kv_heads,
            max_position_embeddings=max(8192, trial.sequence),
            tie_word_embeddings=sizes.tied_embeddings,
        )
    config.use_cache = False
    dtype = torch.float32 if trial.autocast else torch.bfloat16
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.train()
    if trial.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def main(arguments: Sequence[str]) -> int:
    """Measure the trials and write their rows; return the exit code."""
    parser = argparse.ArgumentParser(description="Steps of models of transformers on one GPU, as rows.")
    parser.add_argument("file", help="file of rows to write, .jsonl")
    parser.add_argument("--seconds", type=float, default=240.0, help="no trial is begun after so many seconds")
    options = parser.parse_args(arguments)
    with open(options.file, "w", encoding="utf-8") as file:
        for row in measure_rows(TRIALS, options.seconds):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(row["model"], row["status"], row.get("step_time_s"), row.get("peak_mem_gib"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
