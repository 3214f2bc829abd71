"""A job is what its document says, also a document of an earlier version of the program."""

import json
from dataclasses import replace

from meshwise.executor.job import Job
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ..strategies.problems import problem


def job() -> Job:
    small = problem(devices=2, batch=4)
    spec = Transformer(layers=2, hidden=16, heads=2, kv_heads=2, ffn=32, vocab=64)
    return Job(spec, small.training, complete(small, Layout(data=2)), steps=1)


def test_a_job_comes_back_from_its_text() -> None:
    composed = replace(job(), training=replace(job().training, composed=("rms_norm", "rotary")))
    for one in (job(), composed):
        assert Job.from_document(json.loads(one.to_text()), "job.json") == one


def test_earlier_jobs_say_of_norms_alone_whether_they_are_composed() -> None:
    for composes, composed in ((True, ("rms_norm",)), (False, ())):
        document = json.loads(job().to_text())
        del document["training"]["composed"]
        document["training"]["composes_norms"] = composes
        assert Job.from_document(document, "job.json").training.composed == composed
