"""Measures training steps of whole models on one device, and their peak memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.executor.calibration.device_machine import GIB, Machine
from meshwise.executor.calibration.device_measures import Note, Skip, release
from meshwise.executor.model.network import Network
from meshwise.executor.recording.timer import Timer
from meshwise.executor.supported import lacking
from meshwise.simulator.models.presets import PRESETS
from meshwise.simulator.models.transformer import Transformer

WARM_UP, STEPS = 3, 5
SEQUENCE = 2048
BYTES_A_PARAMETER = 16
"""Bytes of states per parameter: weights and gradients in bf16, main weights and two moments in fp32 (Rajbhandari
et al. 2020, "ZeRO", section 3.1)."""
MOST_STATES = 256 * GIB
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


def candidates() -> tuple[TrainingRun, ...]:
    """Return training of the presets that the executor can build and one device may hold, the smallest first."""
    built = [spec for spec in PRESETS.values() if not any(lacking(spec, SEQUENCE))]
    small = sorted((spec for spec in built if states(spec) < MOST_STATES), key=states)
    return tuple(TrainingRun(spec, SEQUENCE, 8 if states(spec) < 32e9 else 1) for spec in small)


def trial() -> tuple[TrainingRun, ...]:
    """Return training of a GPT and a Llama of a few thousand parameters, for a CPU."""
    plain = Transformer(layers=2, hidden=16, heads=2, kv_heads=2, ffn=32, vocab=64, name="trial-gpt")
    gated = replace(
        plain,
        kv_heads=1,
        ffn_kind="swiglu",
        positions="rotary",
        tied_embeddings=False,
        name="trial-llama",
    )
    return TrainingRun(plain, 16, 2), TrainingRun(gated, 16, 2)


def training_rows(
    runs: Iterable[TrainingRun], machine: Machine, timer: Timer, note: Note, skip: Skip, most: int = 10
) -> Iterator[dict[str, Any]]:
    """Yield a row for the first ``most`` runs whose states fit; running out of memory gives the status ``oom``."""
    done = 0
    for run in runs:
        if states(run.spec) > machine.memory:
            skip(f"training of {run.spec.name}", f"its states take {states(run.spec) / GIB:.0f} GiB")
        elif done < most:
            done += 1
            note(f"training steps of {run.spec.name}")
            yield {**run.fields(machine), **_result(run, timer)}
            release(timer.device)


def states(spec: Transformer) -> float:
    """Return the bytes of weights, gradients and optimizer states of a model."""
    return float(BYTES_A_PARAMETER * spec.graph(1, "bf16").num_parameters)


def _result(run: TrainingRun, timer: Timer) -> dict[str, Any]:
    try:
        return {"status": "ok", **_measured(run, timer)}
    except torch.OutOfMemoryError:
        return {"status": "oom"}


def _measured(run: TrainingRun, timer: Timer) -> dict[str, Any]:
    device = timer.device
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        model = whole(run.spec, run.sequence).to(torch.bfloat16)
    optimizer = MainWeights(list(model.parameters()))
    shape = run.microbatch, run.sequence
    tokens, targets = torch.randint(run.spec.vocab, (2, *shape), device=device)

    def step() -> None:
        torch.autograd.backward(loss(model(tokens), targets))
        optimizer.step()

    # the first steps allocate memory and optimizer states, and choose kernels
    times = [timer.once(step) for _ in range(WARM_UP + STEPS)]
    memory = {
        "peak_mem_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_mem_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "mem_note": "torch max_memory_allocated",
    }
    return {"step_time_s": median(times[WARM_UP:]), **(memory if cuda else {})}


def whole(spec: Transformer, sequence: int) -> Network:
    """Return a network with all blocks of a model."""
    return Network(spec, sequence, [name for name, _ in spec.graph(sequence, "bf16").occurrences])


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens, in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class MainWeights:
    """AdamW over fp32 copies of 16-bit parameters, bucket by bucket: few gradients are in fp32 at the same time."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.buckets = []
        for bucket in buckets(parameters):
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


def buckets(parameters: Iterable[nn.Parameter], most: int = BUCKET) -> list[list[nn.Parameter]]:
    """Return ``parameters`` in order, cut into lists of at most ``most`` elements or of one parameter."""
    found: list[list[nn.Parameter]] = []
    size = most
    for parameter in parameters:
        size += parameter.numel()
        if size > most:
            found.append([])
            size = parameter.numel()
        found[-1].append(parameter)
    return found
