"""Measures training steps of whole models on one device, and their peak memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from meshwise.executor.calibration.device_machine import GIB, Machine
from meshwise.executor.calibration.device_measures import Note, Skip, release_memory
from meshwise.executor.model.network import Network, cross_entropy
from meshwise.executor.recording.timer import Timer
from meshwise.executor.supported import find_lacking
from meshwise.simulator.models.presets import PRESETS
from meshwise.simulator.models.transformer import Transformer

WARM_UP, STEPS = 3, 5
SEQUENCE = 2048
BYTES_PER_PARAMETER = 16
"""Bytes of states per parameter: weights and gradients in bf16, main weights and two moments in fp32 (Rajbhandari
et al. 2020, "ZeRO", section 3.1)."""
MAX_STATES = 256 * GIB
"""Bytes of states from which on a model is not tried."""
BUCKET = 2**26
"""Number of parameters whose gradients are converted to fp32 at once."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Training of a model in bf16 with AdamW, with ``microbatch`` sequences a step."""

    spec: Transformer
    sequence: int
    microbatch: int

    def fields(self, machine: Machine) -> dict[str, Any]:
        """Return the fields of the row, except the measured ones."""
        spec = self.spec
        return {
            **machine.fields(),
            "row_id": f"{machine.fields()['source_id']}_{spec.name}_{self.sequence}x{self.microbatch}",
            "model": spec.name,
            "arch": "llama" if spec.ffn_kind == "swiglu" else "gpt",
            "n_layers": spec.layers,
            "hidden": spec.hidden,
            "n_heads": spec.heads,
            "n_kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "ffn_hidden": spec.ffn,
            "ffn_type": spec.ffn_kind,
            "vocab": spec.vocab,
            "seq_len": self.sequence,
            "tied_embeddings": spec.tied_embeddings,
            "attention_kernel": "torch sdpa",
            "precision": "bf16",
            "optimizer": "AdamW",
            "framework": "torch eager",
            "n_devices": 1,
            "devices_per_node": 1,
            **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "vpp"), 1),
            "zero_stage": 0,
            "recompute": "none",
            "micro_batch": self.microbatch,
            "grad_accum": 1,
            "global_batch": self.microbatch,
            "schedule": "none",
            "offload": "none",
            "plan_note": "bf16 gradients; main weights and moments in fp32",
        }


def list_candidates() -> tuple[TrainingRun, ...]:
    """Return training of the presets that the executor can build and one device may hold, the smallest first."""
    built_specs = [spec for spec in PRESETS.values() if not any(find_lacking(spec, SEQUENCE))]
    small_specs = sorted((spec for spec in built_specs if count_states(spec) < MAX_STATES), key=count_states)
    return tuple(TrainingRun(spec, SEQUENCE, 8 if count_states(spec) < 32e9 else 1) for spec in small_specs)


def build_trials() -> tuple[TrainingRun, ...]:
    """Return training of a GPT and a Llama of a few thousand parameters, for a CPU."""
    gpt_spec = Transformer(layers=2, hidden=16, heads=2, kv_heads=2, ffn=32, vocab=64, name="trial-gpt")
    llama_spec = replace(
        gpt_spec, kv_heads=1, ffn_kind="swiglu", positions="rotary", tied_embeddings=False, name="trial-llama"
    )
    return TrainingRun(gpt_spec, 16, 2), TrainingRun(llama_spec, 16, 2)


def measure_training(
    training_runs: Iterable[TrainingRun], machine: Machine, timer: Timer, note: Note, skip: Skip, max_rows: int = 10
) -> Iterator[dict[str, Any]]:
    """Yield a row for the first ``max_rows`` runs whose states fit; running out of memory gives the status ``oom``."""
    num_rows = 0
    for training_run in training_runs:
        if count_states(training_run.spec) > machine.memory:
            states_text = f"its states take {count_states(training_run.spec) / GIB:.0f} GiB"
            skip(f"training of {training_run.spec.name}", states_text)
        elif num_rows < max_rows:
            num_rows += 1
            note(f"training steps of {training_run.spec.name}")
            yield {**training_run.fields(machine), **_measure_run(training_run, timer)}
            release_memory(timer.device)


def count_states(spec: Transformer) -> float:
    """Return the bytes of weights, gradients and optimizer states of a model."""
    return float(BYTES_PER_PARAMETER * spec.graph(1, "bf16").num_parameters)


def _measure_run(training_run: TrainingRun, timer: Timer) -> dict[str, Any]:
    try:
        return {"status": "ok", **_time_steps(training_run, timer)}
    except torch.OutOfMemoryError:
        return {"status": "oom"}


def _time_steps(training_run: TrainingRun, timer: Timer) -> dict[str, Any]:
    device = timer.device
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        model = build_network(training_run.spec, training_run.sequence).to(torch.bfloat16)
    optimizer = MainWeights(list(model.parameters()))
    shape = training_run.microbatch, training_run.sequence
    tokens, targets = torch.randint(training_run.spec.vocab, (2, *shape), device=device)

    def step() -> None:
        torch.autograd.backward(cross_entropy(model(tokens).float(), targets))
        optimizer.step()

    # the first steps allocate memory and optimizer states, and choose kernels
    times = [timer.measure_once(step) for _ in range(WARM_UP + STEPS)]
    memory_fields = {
        "peak_mem_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_mem_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "mem_note": "torch max_memory_allocated",
    }
    return {"step_time_s": median(times[WARM_UP:]), **(memory_fields if is_cuda else {})}


def build_network(spec: Transformer, sequence: int) -> Network:
    """Return a network with all blocks of a model."""
    return Network(spec, sequence, [name for name, _ in spec.graph(sequence, "bf16").occurrences])


class MainWeights:
    """AdamW over fp32 copies of 16-bit parameters, bucket by bucket: few gradients are in fp32 at the same time."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.buckets = []
        for bucket in split_buckets(parameters):
            mains = [nn.Parameter(parameter.detach().float()) for parameter in bucket]
            self.buckets.append((bucket, mains, torch.optim.AdamW(mains, lr=1e-4, fused=True)))

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter and drop its gradient."""
        for bucket, mains, optimizer in self.buckets:
            for parameter, main in zip(bucket, mains, strict=True):
                main.grad = None if parameter.grad is None else parameter.grad.float()
            optimizer.step()
            for parameter, main in zip(bucket, mains, strict=True):
                parameter.copy_(main)
                parameter.grad = main.grad = None


def split_buckets(parameters: Iterable[nn.Parameter], max_elements: int = BUCKET) -> list[list[nn.Parameter]]:
    """Return ``parameters`` in order, cut into lists of at most ``max_elements`` elements or of one parameter."""
    parameter_buckets: list[list[nn.Parameter]] = []
    size = max_elements
    for parameter in parameters:
        size += parameter.numel()
        if size > max_elements:
            parameter_buckets.append([])
            size = parameter.numel()
        parameter_buckets[-1].append(parameter)
    return parameter_buckets
