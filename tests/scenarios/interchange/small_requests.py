"""Small requests for the tests of every trainer."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshwise.scenarios.interchange.facts import PLAN, TrainerRequest
from meshwise.scenarios.interchange.targets import TARGETS
from meshwise.simulator.catalog import cluster
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem, Training

GPT = Transformer(layers=8, hidden=64, heads=8, kv_heads=8, ffn=256, vocab=256, tied_embeddings=False)
LLAMA = replace(GPT, kv_heads=4, ffn_kind="swiglu", positions="rotary", vocab=64)
MIXTURE = replace(LLAMA, experts=Experts(count=8, top_k=2, ffn=32, shared=1, dense_layers=1))
MODELS = {"gpt": GPT, "llama": LLAMA, "mixture": MIXTURE}
TRAINING = Training(global_batch=32, sequence=64, gradient_clipping=True)


@lru_cache(maxsize=256)
def problem(model: str, ranks: int, training: Training = TRAINING) -> Problem:
    graph = build(MODELS[model], training.sequence, training.dtype)
    return Problem(graph, cluster("dgx-a100-80gb", max(1, ranks // 8), min(ranks, 8)), training)


def request(model: str = "gpt", training: Training = TRAINING, name: str = "small", **layout: Any) -> TrainerRequest:
    """Return the request of a layout on as many devices as it has ranks."""
    laid = Layout(**layout)
    ranks = laid.data * laid.tensor * laid.tensor_rows * laid.pipeline * laid.context
    of = problem(model, ranks, training)
    return TrainerRequest(name, MODELS[model], of, complete(of, laid))


def check_meaning(name: str, text: str, expected: dict[str, Any]) -> None:
    """Assert that a trainer's file means what is expected, and says of the plan nothing else."""
    facts = TARGETS[name].read(text.encode())
    assert {field: facts[field] for field in expected} == expected
    assert set(facts) - set(expected) - set(PLAN) <= {
        each for each in facts if each.startswith(("training.", "model."))
    }
