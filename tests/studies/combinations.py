"""Which techniques can be combined: every pair is simulated on a small machine, or refused with the reason.

Run ``python -m tests.studies.combinations`` to write the table in ``docs/combinations.md``.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

from meshwise.simulator.catalog import cluster
from meshwise.simulator.engine import step_time
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import ZERO_STAGES, Layout
from meshwise.strategies.plan.offloading import OFFLOADS, Offloading, offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES

_OFFLOADED = (["optimizer"], ["activations"], ["optimizer", "parameters"])
"""States that are offloaded together: the host that stores parameters also updates them."""

LAYERS, BATCH, SEQUENCE = 16, 32, 512


class Technique(NamedTuple):
    """A technique by name, and the fields of a `Layout` that select it."""

    name: str
    fields: Mapping[str, Any]


class Outcome(NamedTuple):
    """The result of two techniques together: the step time in seconds, or the reason why the plan is refused."""

    technique: str
    partner: str
    step_time: float | None
    reason: str


def list_techniques() -> tuple[Technique, ...]:
    """Return all techniques, each in its simplest form."""
    degrees = [Technique(name, {name: 2}) for name in ("data", "tensor")]
    context = [Technique(f"context, {attention}", {"context": 2, "attention": attention}) for attention in Attention]
    zero = [Technique(f"zero {level}", {"zero": level, "data": 2}) for level in ZERO_STAGES[1:]]
    schedules = [
        Technique(name, {"schedule": name, "pipeline": 2, "chunks": 1 if rule.chunks[1] == 1 else 2})
        for name, rule in SCHEDULES.items()
    ]
    recompute = [
        Technique(f"{choice} recompute", {"recompute": choice}) for choice in Recompute if choice is not Recompute.NONE
    ]
    other_techniques = [
        Technique("sequence parallel", {"sequence_parallel": True, "tensor": 2}),
        Technique("tensor overlap", {"overlap_tensor": True, "sequence_parallel": True, "tensor": 2}),
        Technique("tensor, 2-D", {"tensor": 2, "tensor_rows": 2, "microbatch": 2}),
        Technique("expert", {"expert": 2, "data": 2}),
        Technique("uneven batches", {"microbatch": (6, 2), "data": 2}),
        *(Technique(f"{names[-1]} offload", {"offload": offloading(names)}) for names in _OFFLOADED),
    ]
    return (
        *degrees,
        *other_techniques[:3],
        *context,
        *other_techniques[3:5],
        *zero,
        *recompute,
        *other_techniques[5:],
        *schedules,
    )


def simulate_pairs() -> Iterator[Outcome]:
    """Simulate every pair of techniques, and each technique alone, and yield the outcomes."""
    for technique, partner in combinations_with_replacement(list_techniques(), 2):
        yield _simulate_pair(technique, partner)


def _simulate_pair(technique: Technique, partner: Technique) -> Outcome:
    clash = next((name for name, value in technique.fields.items() if partner.fields.get(name, value) != value), None)
    if clash is not None and clash not in (*_SIZES, "offload"):
        return Outcome(technique.name, partner.name, None, f"a plan has one {clash}")
    fields = {**technique.fields, **partner.fields}
    if clash == "offload":  # offloads of different states can be merged
        fields[clash] = Offloading(
            *(getattr(technique.fields[clash], n) or getattr(partner.fields[clash], n) for n in OFFLOADS)
        )
    layout = Layout(**fields, stages="balanced")
    ranks = layout.ranks
    problem = _build_problem(ranks, tied=not layout.offload.parameters)
    violation = next(violations(problem, layout), None)
    if violation is not None:
        return Outcome(technique.name, partner.name, None, violation.message)
    return Outcome(technique.name, partner.name, step_time(lower(problem, complete(problem, layout))), "")


_SIZES = ("microbatch", "data", "tensor", "tensor_rows", "pipeline", "context", "expert")


def _build_problem(ranks: int, *, tied: bool) -> Problem:
    """Return the problem of a small mixture of experts on ``ranks`` devices."""
    experts = Experts(count=8, top_k=2, ffn=1024)
    sizes = LAYERS, 1024, 16, 16, 4096, 32000
    spec = Transformer(*sizes, ffn_kind="swiglu", positions="rotary", tied_embeddings=False, experts=experts)
    machine = cluster("dgx-h100", 1).with_size(max(ranks // 8, 1), min(ranks, 8))
    return Problem(build(spec, SEQUENCE, "bf16"), machine, Training(BATCH, SEQUENCE))


def format_table() -> str:
    """Return the outcomes as a page of Markdown: a + for simulated pairs, and numbered reasons for refused ones."""
    names = [technique.name for technique in list_techniques()]
    reasons: dict[str, int] = {}
    cells: dict[tuple[str, str], str] = {}
    for first_name, partner, seconds, reason in simulate_pairs():
        mark = "+" if seconds is not None else str(reasons.setdefault(reason, len(reasons) + 1))
        cells[first_name, partner] = cells[partner, first_name] = mark
    head = "| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |"
    width = len(names)
    rows = []
    for number, name in enumerate(names, 1):
        marks = " | ".join(cells[name, earlier_name] for earlier_name in names[:number])
        rows.append(f"| {number} {name} | {marks} |{' |' * (width - number)}")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    intro = (
        "# Which techniques go together",
        "",
        "Every pair on a small mixture of experts, written by `python -m tests.studies.combinations`.",
        "`+` is simulated in time and memory; a number is the reason, below, why the plan is refused. Embeddings",
        "are tied but where parameters are offloaded.",
        "",
    )
    return "\n".join([*intro, head, "|---" * (len(names) + 1) + "|", *rows, "", *notes, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.studies.combinations", description=__doc__)
    parser.parse_args()
    Path("docs/combinations.md").write_text(format_table())
