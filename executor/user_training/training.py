"""The steps of one rank of a run of a user's file."""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from meshwise.executor.capture.capture import format_error
from meshwise.executor.cut_modules.cut_stages import make_cut_step
from meshwise.executor.cut_modules.step import CutStep
from meshwise.executor.device import require_device
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.modules.batches import count_samples, count_tokens
from meshwise.executor.modules.blocks import list_blocks
from meshwise.executor.modules.evaluation import EvaluationBatch
from meshwise.executor.modules.optimizers import make_adamw
from meshwise.executor.modules.quiet import drop_nothing
from meshwise.executor.modules.sharding import unwrap
from meshwise.executor.modules.states import is_distributed, require_steps
from meshwise.executor.modules.step import TrainingStep
from meshwise.executor.recording.accelerator import Accelerator, find_accelerator
from meshwise.executor.recording.copies import digest_copies
from meshwise.executor.recording.rank_files import Heartbeat, UserError
from meshwise.executor.stages.parallelize import make_step
from meshwise.executor.starting.draws import seed_draws
from meshwise.executor.user_training.data import iterate_batches
from meshwise.executor.user_training.evaluation import iterate_evaluation
from meshwise.executor.user_training.job import CHECKPOINTS, WEIGHTS, TrainJob, facts_file, metrics_file, stop_file
from meshwise.executor.user_training.step_memory import FEWEST_STEPS, RECORDED_STEP, StepMemory
from meshwise.executor.user_training.user_file import (
    UserFile,
    UserFileError,
    find_own_line,
    load_file,
)


class StopFlag:
    """Whether the run is asked to end, by SIGTERM to this rank or by the command that started it."""

    def __init__(self, folder: Path) -> None:
        self._is_set = False
        self._file = stop_file(folder)
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, number: int, frame: Any) -> None:
        self._is_set = True

    @property
    def is_set(self) -> bool:
        """Whether this rank has been asked."""
        return self._is_set or self._file.exists()

    def ask_all(self, device: torch.device, *, fails: bool = False) -> bool:
        """Return whether any rank was asked to end, or ``fails``."""
        if not dist.is_initialized():
            return self.is_set or fails
        flag = torch.tensor(float(self.is_set or fails), device=device)
        dist.all_reduce(flag)
        return bool(flag)


Step = TrainingStep | CutStep


def train_rank(path: Path, rank: int) -> None:
    """Train the steps of a job on this rank; results go beside the job."""
    job, folder = TrainJob.read(path), path.parent
    heartbeat = Heartbeat(folder, rank)
    heartbeat.beat("start")
    require_device(job.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    accelerator = find_accelerator(job.device)
    if job.layout.num_ranks == 1:
        accelerator.claim_device(1)
        _train_steps(job, folder, rank, heartbeat, accelerator)
        return
    with join_process_group(folder, job.timeout, accelerator):
        _train_steps(job, folder, rank, heartbeat, accelerator)


def _train_steps(job: TrainJob, folder: Path, rank: int, heartbeat: Heartbeat, accelerator: Accelerator) -> None:
    stop, user_file = StopFlag(folder), load_source(job)
    _require_evaluation(job, user_file)
    heartbeat.beat("model")
    step = build_step(job, user_file, accelerator.device)
    facts: dict[str, Any] = {"parameters": count_parameters(step.module), "blocks": len(list_blocks(step.module))}
    checkpoints = folder / CHECKPOINTS
    first_step = step.load(checkpoints) if job.resume else 0
    if job.source is not None and not job.resume:
        step.start_from(job.source)
    require_steps(checkpoints, job.steps, first_step)
    heartbeat.beat("data")
    batches = open_batches(job, user_file, job.layout.find_data_part(rank), job.layout.data, first_step)
    heartbeat.step = first_step
    heartbeat.beat("batch")
    item = read_batch(batches, user_file, first_step)
    if item.error is not None:
        raise item.error
    is_asked = stop.ask_all(accelerator.device)
    step_memory = StepMemory()
    is_recorded = accelerator.read_memory() is None and job.steps - first_step >= FEWEST_STEPS
    recorded_step = first_step + RECORDED_STEP if is_recorded else -1
    with metrics_file(folder, rank).open("w", encoding="utf-8") as metrics:
        for number in range(first_step, job.steps):
            if is_asked:
                return
            heartbeat.step = number
            heartbeat.beat("step")
            start, batch = time.perf_counter(), item.batch
            with step_memory.record(step, batch) if number == recorded_step else nullcontext():
                loss = run_step(step, batch, user_file)
            accelerator.synchronise()
            row: dict[str, Any] = {
                "step": number,
                "loss": loss,
                "seconds": item.seconds + time.perf_counter() - start,
                "samples": count_samples(batch),
                "tokens": count_tokens(batch),
                "learning_rate": step.learning_rate,
            }
            is_last = number + 1 == job.steps
            is_saved = _is_due(job.checkpoint_every, number, is_last=is_last)
            if is_saved:  # before the next batch, which may take long or end the rank
                heartbeat.beat("checkpoint")
                step.save(checkpoints, in_background=True)
            if not is_last and not stop.is_set:
                heartbeat.step = number + 1
                heartbeat.beat("batch")
                item = read_batch(batches, user_file, number + 1)
                heartbeat.step = number
            is_asked = stop.ask_all(accelerator.device, fails=item.error is not None) and not is_last
            if _is_due(job.evaluate_every, number, is_last=is_last) and not is_asked and user_file.evaluation_data:
                row["evaluation"] = evaluate_step(job, step, user_file, rank, heartbeat)
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()
            if is_asked:
                heartbeat.beat("checkpoint")
                if not is_saved:
                    step.save(checkpoints)
                step.finish_saving()
            step.writer.look()
            if item.error is not None:  # on all ranks there is a checkpoint now
                kept = "" if job.is_trial else "; what is done is kept, and --resume goes on from it"
                raise type(item.error)(f"{item.error}{kept}") from item.error
    heartbeat.beat("checkpoint")
    _export(job, step, user_file, folder, rank)
    facts |= _list_facts(job, step, accelerator, step_memory)
    facts_file(folder, rank).write_text(json.dumps(facts))


def _export(job: TrainJob, step: Step, user_file: UserFile, folder: Path, rank: int) -> None:
    """Write the weights at the end, when all checkpoints are written too."""
    if is_distributed(job.weights):
        _make_way(folder / WEIGHTS, rank)
    step.export(folder / WEIGHTS, is_plain=job.is_trial, format=job.weights)
    step.finish_saving()
    if rank == 0 and user_file.save_beside is not None and not job.is_trial:
        user_file.save_beside(folder / WEIGHTS)


def _list_facts(job: TrainJob, step: Step, accelerator: Accelerator, step_memory: StepMemory) -> dict[str, Any]:
    """Return the memory that this rank took, and what it had whole and in parts."""
    memory = accelerator.read_memory()
    facts: dict[str, Any] = {"whole": step.whole_reason, "tables": step.table_words}
    facts["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts |= {} if memory is None else {"peak": memory.peak, "reserved": memory.reserved}
    facts |= {} if step_memory.peak is None else {"peak": step_memory.peak}
    if job.is_trial:
        digests = digest_copies(unwrap(step.module), step.states_by_parameter)
        facts["copies"] = {name: digest for name, digest in digests.items() if name not in step.part_names}
    return facts


def _is_due(every: int, step: int, *, is_last: bool) -> bool:
    """Return whether something that happens every so many steps, and at the end, happens after a step."""
    return every >= 0 and (is_last or bool(every and (step + 1) % every == 0))


def _require_evaluation(job: TrainJob, user_file: UserFile) -> None:
    if job.evaluate_every > 0 and user_file.evaluation_data is None:
        if job.tokens is not None:
            raise UserFileError("--evaluate-every: a model of --hf is evaluated on --evaluation-text FILES, met none")
        rule = "--evaluate-every: the file has evaluation_data(), samples that are not trained on"
        raise UserFileError(f"{user_file.path}: {rule}, met none; nearest: --evaluate-every 0")


def load_source(job: TrainJob) -> UserFile:
    """Return the functions of what a job trains: a user's file, whose code is run, or a model of transformers."""
    if job.tokens is None:
        return load_file(Path(job.file))
    from meshwise.executor.user_training.pretrained import open_pretrained  # needs transformers

    return open_pretrained(job)


def build_step(job: TrainJob, user_file: UserFile, device: torch.device) -> Step:
    """Return the step of training of a user's file."""
    start = user_file.start_model(job.seed)
    if job.without_dropout:
        drop_nothing(start.module)
    make: Any = make_cut_step if job.layout.operator_ranks > 1 else make_step
    step: Step = make(
        start,
        job.layout,
        optimizer=user_file.optimizer or make_adamw(job.learning_rate),
        scheduler=user_file.scheduler,
        loss=user_file.loss,
        precision=job.precision,
        max_norm=job.max_norm,
        device=device,
        seed=job.seed,
    )
    return step


def open_batches(job: TrainJob, user_file: UserFile, rank: int, num_ranks: int, first_step: int) -> Iterator[Any]:
    """Return the batches of a rank from a step on."""
    seed_draws(job.seed)
    data, is_own = user_file.open_data(rank, num_ranks)
    batch = job.batch or user_file.batch
    options = {"rank": rank, "num_ranks": num_ranks, "seed": job.seed, "first_step": first_step}
    return iterate_batches(data, is_own=is_own, batch=batch, **options)


class ReadBatch(NamedTuple):
    """A batch and the seconds that it took to read; without one the reason."""

    batch: Any
    seconds: float
    error: UserError | None


def read_batch(batches: Iterator[Any], user_file: UserFile, step: int) -> ReadBatch:
    """Return the batch of a step, or why there is none."""
    start = time.perf_counter()
    try:
        batch = next_batch(batches, user_file, step)
    except UserError as error:
        return ReadBatch(None, time.perf_counter() - start, error)
    return ReadBatch(batch, time.perf_counter() - start, None)


def next_batch(batches: Iterator[Any], user_file: UserFile, step: int) -> Any:
    """Return the next batch; `UserFileError` where the data end or reading them fails."""
    try:
        return next(batches)
    except StopIteration:
        rule = "data() has a batch for every step"
        raise UserFileError(f"{user_file.path}: {rule}, met its end at step {step}") from None
    except UserError as error:
        raise find_cause(error) from error
    except Exception as error:
        line = find_own_line(error, user_file.path)
        raise UserFileError(f"{line}: data() at step {step}: {format_error(error)}") from error


def find_cause(error: UserError) -> UserError:
    """Return an error as it was raised in a worker of a loader, which torch wraps into its traceback."""
    text = str(error).strip()
    is_of_worker = "\nOriginal Traceback" in text
    return type(error)(text.splitlines()[-1].partition(": ")[2]) if is_of_worker else error


def evaluate_step(job: TrainJob, step: Step, user_file: UserFile, rank: int, heartbeat: Heartbeat) -> dict[str, float]:
    """Return the figures of the user's evaluation over all samples; an error in his code names its line."""
    heartbeat.beat("evaluation")

    def tell(item: EvaluationBatch) -> EvaluationBatch:
        heartbeat.beat("evaluation")
        return item

    try:
        seed_draws(job.seed)
        data_rank = job.layout.find_data_part(rank)
        data, is_own = user_file.open_data(data_rank, job.layout.data, "evaluation_data")
        batch = job.batch or user_file.batch
        batches = iterate_evaluation(data, is_own=is_own, batch=batch, rank=data_rank, num_ranks=job.layout.data)
        return step.evaluate(user_file.evaluate, map(tell, batches), is_marked=True)
    except UserError:
        raise
    except Exception as error:
        raise_with_line(error, user_file, "evaluate(): ")


def _make_way(weights: Path, rank: int) -> None:
    """Remove the weights of this run in the other form; it is a collective."""
    if rank == 0:
        shutil.rmtree(weights, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()


def run_step(step: Step, batch: Any, user_file: UserFile) -> float:
    """Return the loss of a step; an error in the user's own code names its line."""
    try:
        return step(batch)
    except UserError:
        raise
    except Exception as error:
        raise_with_line(error, user_file)


def raise_with_line(error: Exception, user_file: UserFile, words: str = "") -> NoReturn:
    """Raise an error again, as a `UserFileError` with the line where it came through the user's own code."""
    line = find_own_line(error, user_file.path)
    if line == str(user_file.path):
        raise error
    raise UserFileError(f"{line}: {words}{format_error(error)}") from error


def count_parameters(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def print_to_stderr() -> None:
    """Have what a user's file prints go to stderr, so that results alone are on stdout."""
    sys.stdout = sys.stderr
