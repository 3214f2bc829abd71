"""Training steps of real models on one device, measured for a comparison with predictions.

``python -m tests.studies.device_trials``

Each trial runs one plan of one rank in the executor's own trainer, with one variant of recompute, offload or precision
at a time. Its row has the median of the timed steps and the memory of torch's allocator. Predictions are made
separately (``python -m tests.studies.device_predictions``), so that the device needs torch and no
simulator. Rows are written as they are measured; one that runs out of memory says so. With ``--device cpu`` the models
are tiny, as a test of this program.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from meshwise.executor.device import CPU, CUDA, DEVICES, require_device
from meshwise.executor.job import Job, result_file
from meshwise.executor.launch.launcher import require_torch
from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.timeline import read_timeline, sum_busy_times
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import offloading
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

from .techniques import build_machine

WARM_UP, STEPS, FEWEST = 3, 20, 5
LONGEST = 12.0
"""Seconds that the timed steps of a trial take at most, about; at least `FEWEST` steps are timed all the same."""
MICROBATCHES = 2


def _build_gpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    """Return a model of Brown et al. 2020, "Language models are few-shot learners", table 2.1."""
    return Transformer(layers, hidden, heads, heads, 4 * hidden, 50304, name=name)


def _build_llama(
    name: str,
    layers: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    hidden: int = 2048,
    heads: int = 32,
    *,
    tied: bool = False,
) -> Transformer:
    gated_fields: dict[str, Any] = {"ffn_kind": "swiglu", "positions": "rotary", "tied_embeddings": tied}
    return Transformer(layers, hidden, heads, kv_heads, ffn, vocab, name=name, **gated_fields)


MODELS: tuple[tuple[Transformer, int, int], ...] = (
    (_build_gpt("gpt-125m", 12, 768, 12), 1024, 16),
    (_build_gpt("gpt-350m", 24, 1024, 16), 1024, 16),
    (_build_gpt("gpt-760m", 24, 1536, 16), 1024, 8),
    (_build_gpt("gpt-1.3b", 24, 2048, 16), 2048, 4),
    (_build_llama("tinyllama-1.1b", 22, 4, 5632, 32000), 2048, 4),
    (_build_llama("llama-3.2-1b", 16, 8, 8192, 128256, tied=True), 2048, 2),
)
"""Models, each with its tokens per sequence and sequences per microbatch. The last two have the sizes of Zhang et al.
2024, "TinyLlama", table 1, and of ``config.json`` of meta-llama/Llama-3.2-1B."""
TINY: tuple[tuple[Transformer, int, int], ...] = (
    (Transformer(4, 32, 2, 2, 64, 256, name="tiny-gpt"), 16, 2),
    (_build_llama("tiny-llama", 4, 1, 64, 256, 32, 2), 16, 2),
)
"""The same for trials on a CPU."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan of one model; where it is ``profiled``, one more step is measured operation by operation."""

    name: str
    spec: Transformer
    training: Training
    layout: Layout
    profiled: bool = False

    def job(self, device: str) -> Job:
        """Return the job of the rank; the trial itself decides how many steps run."""
        problem = Problem(
            build(self.spec, self.training.sequence, self.training.precision), build_machine(1), self.training
        )
        return Job(self.spec, self.training, complete(problem, self.layout), steps=STEPS, device=device)


def trials(device: str) -> list[Trial]:
    """Return all trials, small models first."""
    models = TINY if device == CPU else MODELS
    return [trial for index, model in enumerate(models) for trial in _list_model_trials(*model, all_variants=index < 4)]


def _list_model_trials(spec: Transformer, sequence: int, microbatch: int, *, all_variants: bool) -> Iterator[Trial]:
    """Yield the trials of a model; those with states on the host only where it is ``all_variants``."""

    def trial(name: str, precision: str = "bf16", profiled: bool = False, **layout: Any) -> Trial:
        training = Training(microbatch * MICROBATCHES, sequence, precision, framework="torch")
        return Trial(name, spec, training, Layout(microbatch=microbatch, **layout), profiled)

    yield trial("plain", profiled=True)
    yield trial("selective recompute", recompute=Recompute.SELECTIVE)
    yield trial("full recompute", recompute=Recompute.FULL)
    if all_variants:
        yield trial("activations on the host", profiled=True, offload=offloading(["activations"]))
        yield trial("optimizer on the host", profiled=True, offload=offloading(["optimizer"]))
        yield trial("optimizer and parameters on the host", offload=offloading(["optimizer", "parameters"]))
    if spec.hidden < 1500:
        yield trial("fp32", precision="fp32")


def measure(out: Path, device: str, seconds: float) -> dict[str, Any]:
    """Run trials for about ``seconds`` and return the document of their rows, which ``out`` gets after every row.

    Raises
    ------
    ValueError
        Where the device does not exist.
    """
    require_torch()
    require_device(device, 1)
    from meshwise.executor.calibration.device_machine import describe_machine
    from meshwise.executor.launch.process_group import join_process_group
    from meshwise.executor.recording.accelerator import find_accelerator  # torch takes seconds to import

    end, accelerator = monotonic() + seconds, find_accelerator(device)
    this_device = describe_machine(device)
    document: dict[str, Any] = {"machine": this_device.fields() | {"python": platform.python_version()}, "rows": []}
    document["left_out"] = [_label_trial(trial) for trial in trials(device)]
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name, join_process_group(Path(name), 600.0, accelerator):
        for trial in trials(device):
            if monotonic() > end:
                break
            document["rows"].append(_measure_row(trial, device, Path(name)))
            document["left_out"].pop(0)
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            _say(_describe_row(document["rows"][-1]))
    return document


def _label_trial(trial: Trial) -> str:
    return f"{trial.spec.name} {trial.training.sequence} {trial.name}"


def _measure_row(trial: Trial, device: str, folder: Path) -> dict[str, Any]:
    """Return the row of a trial; ``status`` is ok, oom or failed."""
    import torch

    job = trial.job(device)
    row = {"trial": _label_trial(trial), "job": json.loads(job.to_text())}
    try:
        return {**row, "status": "ok", **_measure_trial(trial, job, folder)}
    except torch.OutOfMemoryError:
        return {**row, "status": "oom"}
    except RuntimeError as error:  # torch's: one plan that does not run leaves the others
        return {**row, "status": "failed", "error": str(error).strip()[:500]}


def _measure_trial(trial: Trial, job: Job, folder: Path) -> dict[str, Any]:
    """Return the measured figures of a trial: times in seconds, memory in bytes."""
    from meshwise.executor.recording.accelerator import find_accelerator
    from meshwise.executor.training.measure import describe_memory, profile_step, time_step

    from .trial_trainer import TrialTrainer

    accelerator = find_accelerator(job.device)
    accelerator.settle(exact=False)
    gc.collect()  # frees what an earlier trial left when it ran out of memory
    accelerator.reset_peak()
    trainer = TrialTrainer(job, Recorder(Heartbeat(folder, 0), accelerator.synchronise), accelerator)
    warm_times = [time_step(accelerator, lambda: trainer.step(0))[1] for _ in range(WARM_UP)]
    accelerator.reset_peak()
    count = min(max(int(LONGEST / max(warm_times[-1], 1e-6)), FEWEST), STEPS)
    losses, times = zip(*(time_step(accelerator, lambda: trainer.step(0)) for _ in range(count)), strict=True)
    figures = {
        "step_time": median(times),
        "step_times": list(times),
        "loss": losses[-1],
        "parameters": sum(parameter.numel() for parameter in trainer.parameters),
        "host_peak": trainer.host.peak_bytes,
        **describe_memory(accelerator.read_memory()),
    }
    return figures | ({"kinds": _time_kinds(job, profile_step(trainer), figures, folder)} if trial.profiled else {})


def _time_kinds(job: Job, profiled: dict[str, Any], figures: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return the busy seconds of each kind of task in a profiled step, and of the whole step."""
    result_file(folder, 0).write_text(json.dumps(profiled))
    timeline = read_timeline(job.plan, folder)
    return {str(kind): busy_time for kind, busy_time in sum_busy_times(timeline).items()} | {"step": timeline.step_time}


def _describe_row(row: dict[str, Any]) -> str:
    device_memory = row.get("held")
    peak = f", {device_memory['peak'] / 2**30:.1f} GiB" if device_memory else ""
    outcome = f"{row['step_time'] * 1e3:.1f} ms{peak}" if row["status"] == "ok" else row.get("error", row["status"])
    return f"{row['trial']}: {outcome}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code: 0, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.device_trials", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="where rows go")
    parser.add_argument("--device", choices=DEVICES, default=CUDA, help="cuda, or cpu with tiny models (cuda)")
    parser.add_argument("--seconds", type=float, default=450.0, help="after which no trial begins (450)")
    options = parser.parse_args(arguments)
    try:
        document = measure(options.out, options.device, options.seconds)
    except KeyboardInterrupt:
        _say(f"interrupted: {options.out} has the rows that are done")
        return INTERRUPTED
    except (ValueError, OSError) as error:
        _say(str(error))
        return 2
    for label in document["left_out"]:
        _say(f"left out, for time: {label}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
