"""Plans of tiny models, a few for every technique that a trainer has, and what is expected of all of them."""

from dataclasses import replace
from typing import Any

from meshwise.scenarios.interchange.facts import Facts, TrainerRequest, collect_facts
from meshwise.simulator.catalog import cluster
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.problem import Problem, Training

LLAMA = Transformer(
    layers=8,
    hidden=64,
    heads=8,
    kv_heads=4,
    ffn=256,
    vocab=256,
    tied_embeddings=False,
    ffn_kind="swiglu",
    positions="rotary",
    name="llama3-tiny",
)
GPT = Transformer(layers=8, hidden=64, heads=8, kv_heads=8, ffn=256, vocab=256, tied_embeddings=False, name="gpt-tiny")
QWEN = replace(LLAMA, kv_channels=16, qk_norm=True, name="qwen3-tiny")
EXPERTS = replace(QWEN, experts=Experts(count=8, top_k=2, ffn=32), name="qwen3-experts-tiny")
TRAINING = Training(global_batch=16, sequence=64, gradient_clipping=True)
SAME = replace(TRAINING, gradient_precision="same")
STATES = Offloading(optimizer=(1.0,))
ALL = Offloading(optimizer=(1.0,), parameters=(1.0,))


def make_request(spec: Transformer = LLAMA, training: Training = TRAINING, **layout: Any) -> TrainerRequest:
    """Return the request of a layout on as many devices as it has ranks."""
    laid = Layout(**layout)
    ranks = laid.data * laid.tensor * laid.pipeline * laid.context
    graph = build(spec, training.sequence, training.dtype)
    problem = Problem(graph, cluster("dgx-h100", max(1, ranks // 8), min(ranks, 8)), training)
    return TrainerRequest(spec.name, spec, problem, complete(problem, laid))


def count_parameters(request: TrainerRequest) -> int:
    """Return the parameters of a request's model."""
    return request.problem.graph.num_parameters


def describe_plan(request: TrainerRequest) -> Facts:
    """Return the facts of a request by their last names, with the number of microbatches."""
    facts = {name.removeprefix("plan."): value for name, value in collect_facts(request).items()}
    size = facts["microbatch"]
    return facts | {"microbatches": facts["training.global_batch"] // (facts["data"] * size)}


def select(facts: Facts, *names: str) -> Facts:
    """Return some of the facts, with the size and number of microbatches."""
    return {name: facts[name] for name in (*names, "microbatch", "microbatches")}


def find_differences(actual: Facts, expected: Facts) -> list[str]:
    """Return a line for every expected fact that differs, or the error of the trainer."""
    if "error" in actual:
        return [actual["error"]]
    return [
        f"{name}: {value} in the plan, {actual.get(name)!r} in the trainer"
        for name, value in expected.items()
        if actual.get(name) != value
    ]
