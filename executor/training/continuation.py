"""How a run continues from a checkpoint: what must be the same, what it takes over, and what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from meshwise.executor.job import Job, checkpoints_folder
from meshwise.executor.options import CONSTANT_RATE, LearningRate, RunOptions
from meshwise.executor.training.checkpoint import Checkpoint, find_last_good, list_checkpoints
from meshwise.executor.training.data import Text, TextFiles, open_text
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

_TRAINING = ("global_batch", "sequence", "precision", "optimizer", "gradient_precision", "gradient_clipping")
"""The fields of a training step that decide the numbers that a run computes."""


def describe_run(job: Job, text: Text) -> dict[str, Any]:
    """Return what a checkpoint of a job says besides its step and tensors, as JSON-ready data.

    It has gone through JSON once, so that it compares equal with what a manifest reads back: lists, not tuples.
    """
    document = {
        "model": asdict(job.spec),
        "training": {field: getattr(job.training, field) for field in _TRAINING},
        "plan": job.plan.describe(),
        "seed": job.seed,
        "learning_rate": asdict(job.learning_rate),
        "data": {"name": text.name, "bytes": text.num_bytes, "sha256": text.digest},
    }
    result: dict[str, Any] = json.loads(json.dumps(document))
    return result


def prepare_job(
    spec: Transformer, training: Training, plan: Plan, options: RunOptions, folder: Path
) -> tuple[Job, tuple[str, ...]]:
    """Return the job of a run in ``folder``, new or from a checkpoint, and what is wrong with newer checkpoints.

    ``ValueError`` where data or checkpoint do not fit, or where the run would overwrite checkpoints.
    """
    if plan.asynchronous and (options.checkpoint_every or options.resume):
        rule = "between steps of a schedule without a flush microbatches are under way, which no checkpoint has"
        raise ValueError(f"schedule: {rule}, met {plan.rule.name}; nearest: 1f1b")
    place = checkpoints_folder(folder)
    job = Job(
        spec,
        training,
        plan,
        options.steps,
        seed=options.seed or 0,
        timeout=options.timeout,
        data=None if options.data is None else str(Path(options.data).resolve()),
        learning_rate=options.learning_rate or CONSTANT_RATE,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        device=options.device,
    )
    text = open_text(job.data, job.seed)
    if isinstance(text, TextFiles):
        text.check(training.sequence)
    if not options.resume:
        if list_checkpoints(place):
            raise ValueError(f"{place} has checkpoints already; --resume goes on from them, or choose another folder")
        return job, ()
    checkpoint, damaged = find_last_good(place)
    return continue_job(job, text, options, checkpoint), damaged


def continue_job(job: Job, text: Text, options: RunOptions, checkpoint: Checkpoint) -> Job:
    """Return the job as it goes on from a checkpoint; ``ValueError`` where that is of something else."""
    if job.steps <= checkpoint.step:
        rule = f"{checkpoint.folder} was made after {checkpoint.step} steps; a run that resumes has more of them in all"
        raise ValueError(f"{rule}, met steps {job.steps}")
    try:
        saved_rate = LearningRate(**checkpoint.facts["learning_rate"])
        seed_change = {"seed": checkpoint.facts["seed"]} if options.seed is None else {}
        result = replace(job, **seed_change, learning_rate=options.learning_rate or saved_rate)
        saved_facts = [(key, checkpoint.facts[key]) for key in ("model", "training", "seed", "learning_rate", "data")]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{checkpoint.folder} is a checkpoint of this program, met {error!r:.100}") from None
    expected = describe_run(result, text)
    differences = [difference for key, value in saved_facts for difference in _differences(key, value, expected[key])]
    if differences:
        raise ValueError(f"{checkpoint.folder} is of another run: {'; '.join(differences)}")
    return replace(result, resume=str(checkpoint.folder.resolve()), first_step=checkpoint.step)


def _differences(key: str, saved: Any, expected: Any) -> list[str]:
    """Return the differences in words; names of models and data may differ."""
    if not isinstance(saved, dict) or not isinstance(expected, dict):
        return [] if saved == expected else [f"its {key} is {saved!r:.60}, this run's {expected!r:.60}"]
    rows = [(field, saved.get(field), expected.get(field)) for field in {**expected, **saved} if field != "name"]
    changed_rows = [(field, a, b) for field, a, b in rows if a != b]
    if changed_rows and key == "data":
        a, b = (
            f"{document.get('name')!r:.60} of {document.get('bytes')!r:.20} bytes" for document in (saved, expected)
        )
        return [f"its data is {a}, this run's {b}, which are not the same text; --data names it"]
    return [f"its {key} has {field} {a!r:.60}, this run's {b!r:.60}" for field, a, b in changed_rows]
