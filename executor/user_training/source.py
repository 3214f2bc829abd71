"""What a job trains: a user's file, or a model of transformers on packed text."""

from pathlib import Path

from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.user_file import UserFile, load_file


def load_source(job: TrainJob) -> UserFile:
    """Return the functions of a job's source, whose code is run."""
    if job.tokens is None:
        return load_file(Path(job.file))
    from meshwise.executor.user_training.pretrained import open_pretrained  # needs transformers

    return open_pretrained(job)
