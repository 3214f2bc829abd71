"""What `meshwise.parallelize` offers on one device, each beside a plain loop of torch on the same device."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshwise
from meshwise.executor.recording.tensors import to_local

from .language import Llama, Sizes, Tokens
from .rows import OK, RowFile, read_rows

SIZES = Sizes(4, 256, 8, 4, 688, 2048, 256)
TINY = Sizes(2, 16, 2, 1, 32, 64, 8)
STEPS, BATCH, LEARNING_RATE, MAX_NORM = 10, 8, 1e-3, 0.5
LOSS_LIMITS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}
"""Fraction by which a loss may differ from the plain loop's."""
MOVE_LIMITS = {"fp64": 1e-6, "fp32": 2e-2, "bf16": 0.3}
"""Distance of the weights from the plain loop's, as a fraction of how far they moved: steps not done are 1 away."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """What is tried: the words of a plan, and what is said besides."""

    words: str = "data=1"
    precision: str = "fp32"
    max_norm: float | None = None
    has_schedule: bool = False
    is_compiled: bool = False
    is_sharded: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the case in words."""
        marks = [f"clipping {self.max_norm}"] if self.max_norm is not None else []
        marks += ["schedule"] if self.has_schedule else []
        marks += ["compiled"] if self.is_compiled else []
        marks += ["fully_shard over one rank"] if self.is_sharded else []
        return ", ".join((self.precision, self.words, *marks))


ALL_TOGETHER = "num_microbatches=4,recompute=full"
CASES = (
    *(Case(precision=precision) for precision in DTYPES),
    *(Case(words, precision) for words in ("num_microbatches=4", "recompute=full") for precision in ("fp32", "bf16")),
    *(Case(max_norm=MAX_NORM, precision=precision) for precision in ("fp32", "bf16")),
    Case(has_schedule=True),
    *(Case(ALL_TOGETHER, precision, MAX_NORM, has_schedule=True) for precision in DTYPES),
    *(Case(f"data=1,zero={zero}") for zero in (1, 2, 3)),
    *(Case(f"data=1,zero={zero}", is_sharded=True) for zero in (1, 2, 3)),
    Case("data=1,zero=3,num_microbatches=4,recompute=full", max_norm=MAX_NORM, is_sharded=True),
    *(Case(precision=precision, is_compiled=True) for precision in ("fp32", "bf16")),
    Case(ALL_TOGETHER, "bf16", MAX_NORM, is_compiled=True),
)
QUICK = tuple(case for case in CASES if not case.is_compiled)


class Bench:
    """Builds both sides of a case on a device, from the same first weights and batches."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        tokens = Tokens(sizes, STEPS * BATCH)
        self.batches = [
            tuple(part.to(device) for part in tokens.batch(number * BATCH, BATCH)) for number in range(STEPS)
        ]

    def build(self, seed: int = 0) -> Llama:
        """Return the model with first weights."""
        torch.manual_seed(seed)
        return Llama(self.sizes)

    def build_step(self, case: Case, seed: int = 0) -> Any:
        """Return the step of `meshwise.parallelize`."""
        module: nn.Module = self.build(seed).to(self.device)
        if case.is_sharded:
            mesh = init_device_mesh(self.device.type, (1,))
            for layer in module.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            fully_shard(module, mesh=mesh)
        if case.is_compiled:
            module.compile()
        scheduler = build_schedule if case.has_schedule else None
        options = {"precision": case.precision, "max_norm": case.max_norm, **case.options}
        return meshwise.parallelize(module, case.words, optimizer=build_optimizer, scheduler=scheduler, **options)

    def train_plainly(self, case: Case) -> tuple[list[float], Llama]:
        """Return the losses and the module of a loop of torch on whole batches."""
        dtype = DTYPES[case.precision]
        module = self.build().to(self.device, torch.float64 if case.precision == "fp64" else None)
        optimizer = build_optimizer(module)
        scheduler = build_schedule(optimizer) if case.has_schedule else None
        losses = []
        for batch in self.batches:
            with cast(self.device, dtype):
                loss = module(*batch)
            loss.backward()
            if case.max_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), case.max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.item())
        return losses, module


def cast(device: torch.device, dtype: torch.dtype) -> Any:
    """Return the context in which torch computes in bf16, or nothing for other dtypes."""
    return torch.autocast(device.type, dtype) if dtype is torch.bfloat16 else nullcontext()


def build_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


def build_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that every step changes."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * STEPS)


def compare(
    bench: Bench, case: Case, losses: Sequence[float], weights: dict[str, Tensor], plain: tuple[list[float], Llama]
) -> dict[str, Any]:
    """Return how far losses and weights are from the plain loop's; ``AssertionError`` where it is too far."""
    expected_losses, plain_module = plain
    pairs = zip(losses, expected_losses, strict=True)
    loss_difference = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
    first = bench.build().state_dict()
    apart = moved = 0.0
    for name, expected in plain_module.state_dict().items():
        apart += (weights[name].double().cpu() - expected.double().cpu()).square().sum().item()
        moved += (expected.double().cpu() - first[name].double()).square().sum().item()
    distance = (apart / moved) ** 0.5
    summary = f"losses {loss_difference:.1e}, weights {distance:.1e} of their way apart"
    limits = LOSS_LIMITS[case.precision], MOVE_LIMITS[case.precision]
    assert loss_difference <= limits[0] and distance <= limits[1], f"{summary}; at most {limits[0]} and {limits[1]}"
    return {"loss_difference": loss_difference, "weights_distance": distance, "limits": limits, "summary": summary}


def list_weights(step: Any) -> dict[str, Tensor]:
    """Return the weights of a step's module, whole."""
    return {name: to_local(tensor) for name, tensor in step.module.state_dict().items()}


def run_case(bench: Bench, case: Case) -> dict[str, Any]:
    """Return how equal the training of a case is."""
    step = bench.build_step(case)
    losses = [step(batch) for batch in bench.batches]
    return compare(bench, case, losses, list_weights(step), bench.train_plainly(case))


def resume(bench: Bench, case: Case) -> dict[str, Any]:
    """Return how equal a run is that was stopped, and went on from its checkpoint in a module with other weights."""
    half = STEPS // 2
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        step = bench.build_step(case)
        losses = [step(batch) for batch in bench.batches[:half]]
        step.save(folder)
        step = bench.build_step(case, seed=1)
        assert step.load(folder) == half, "the checkpoint says how many steps were done"
        losses += [step(batch) for batch in bench.batches[half:]]
    return compare(bench, case, losses, list_weights(step), bench.train_plainly(case))


def evaluate_and_export(bench: Bench, case: Case) -> dict[str, Any]:
    """Return how equal an evaluation and exported weights are to those of the module."""
    step = bench.build_step(case)
    for batch in bench.batches[:2]:
        step(batch)
    figure = step.evaluate(None, bench.batches)["loss"]
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        step.export(folder)
        weights = load_file(Path(folder, "model.safetensors"))
    fresh = bench.build(seed=1).to(bench.device)
    fresh.load_state_dict(weights)
    with torch.no_grad(), cast(bench.device, DTYPES[case.precision]):
        expected = sum(fresh(*batch).item() for batch in bench.batches) / STEPS
    difference = abs(figure - expected) / expected
    summary = f"evaluation {difference:.1e} apart from that of the exported weights"
    assert difference <= LOSS_LIMITS[case.precision], summary
    return {"difference": difference, "summary": summary}


def keep_user_draws(bench: Bench, case: Case) -> dict[str, Any]:
    """Return that a step leaves the user's random draws on the device as they were."""
    step = bench.build_step(case)
    step(bench.batches[0])
    drawn = []
    for runs in (False, True):
        torch.manual_seed(3)
        torch.rand(3, device=bench.device)
        if runs:
            step(bench.batches[1])
        drawn.append(torch.rand(8, device=bench.device))
    assert torch.equal(*drawn), "a step leaves the draws of the user's data as they were, met others"
    return {"summary": "a step leaves random draws on the device as they were"}


def list_trials(cases: Sequence[Case]) -> Iterator[tuple[str, Callable[[Bench], dict[str, Any]]]]:
    """Yield what is tried, with its name."""
    for case in cases:
        yield case.describe(), partial(run_case, case=case)
    for case in (Case(has_schedule=True), Case(ALL_TOGETHER, "bf16", MAX_NORM)):
        yield f"resume, {case.describe()}", partial(resume, case=case)
    yield f"resume, {Case(is_sharded=True).describe()}", partial(resume, case=Case("data=1,zero=3", is_sharded=True))
    for precision in ("fp32", "bf16"):
        case = Case(precision=precision)
        yield f"evaluation and export, {case.describe()}", partial(evaluate_and_export, case=case)
    yield "random draws", partial(keep_user_draws, case=Case())


@contextmanager
def join_alone(device: torch.device) -> Iterator[None]:
    """Run the body in a process group of this process alone, on the libraries that ranks have on the device."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def measure(rows: RowFile, device: str, *, is_tiny: bool) -> None:
    """Try everything, one row each, and one that counts them."""
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    bench = Bench(place, TINY if is_tiny else SIZES)
    with join_alone(place):
        for name, run in list_trials(QUICK if is_tiny else CASES):
            rows.measure(name, partial(run, bench))
    own = [row for row in read_rows(rows.path) if row["part"] == rows.part]
    equal = sum(row["status"] == OK for row in own)
    rows.write("all", OK, equal=equal, tried=len(own), summary=f"{equal} of {len(own)} equal a plain loop")
