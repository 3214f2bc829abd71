"""What a publisher leaves open is chosen once for a whole sweep, never run by run.

A sweep is the runs of one source with one model on one accelerator, in one precision and for one task, all or none of
them stating ZeRO 3: what is trained, in which numbers and by which engine has settings of its own, while degrees and
batches are what a sweep varies. Its runs that did not lack memory prove what fits: the least ZeRO stage with which
the states of all of them fit, then the least recomputation, then the largest microbatch with which all of them fit.
Measured times have no part in it. A run that lacked memory takes the same choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwise.scenarios.published.estimates import fits
from meshwise.scenarios.published.frameworks import selects_products
from meshwise.scenarios.published.plan import LEVELS, Batch, find_recomputation, list_microbatches
from meshwise.scenarios.published.recompute import keeps_every_second_product, keeps_products, read_recompute
from meshwise.scenarios.published.row import Row
from meshwise.scenarios.published.vocabulary.reading import find_words
from meshwise.simulator.models.model import Model
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations

SweepKey = tuple[str, ...]
"""Source, model, accelerator, precision, engine and task of a sweep."""
TASKS = ("fine_tuning", "frozen")
"""Known words of ``plan_note`` and ``model`` for tasks other than pretraining."""

MAX_ZERO = 3
"""The largest ZeRO stage."""


class Openings(NamedTuple):
    """What a run does not state: whether recomputation and the ZeRO stage are open, and which microbatches are."""

    recompute: bool
    zero: bool
    microbatches: tuple[int, ...]

    @property
    def any(self) -> bool:
        """Whether something is open."""
        return self.recompute or self.zero or len(self.microbatches) > 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A scenario whose ``layout`` is as a row states it, but for ``openings``.

    ``ran`` says that the run did not lack memory; ``assumed`` are the assumptions so far.
    """

    name: str
    place: str
    problem: Problem
    model: Model
    layout: Layout
    openings: Openings
    assumed: tuple[str, ...]
    ran: bool


class Choice(NamedTuple):
    """The choice of a sweep: a least ZeRO stage, a level of `find_recomputation` and a largest microbatch."""

    zero: int = 0
    level: int = 0
    microbatch: int = 1

    def apply(self, draft: Draft) -> Layout:
        """Return the layout of a draft, with what it leaves open as chosen."""
        layout, openings = draft.layout, draft.openings
        if openings.zero and self.zero > layout.zero:
            shards = replace(layout, zero=self.zero, overlap_gradients=layout.overlap_gradients or self.zero > 1)
            layout = shards if next(violations(draft.problem, shards), None) is None else layout
        if openings.recompute:
            layout = replace(layout, recompute=find_recomputation(self.level, layout, draft.problem.graph))
        if len(openings.microbatches) > 1:
            sizes = [size for size in openings.microbatches if size <= self.microbatch]
            layout = replace(layout, microbatch=max(sizes, default=min(openings.microbatches)))
        return layout


def name_sweep(row: Row) -> SweepKey:
    """Return which sweep a row belongs to."""
    task = find_words("plan_note", row.text("plan_note", "model"))
    texts = (row.text("source_id"), row.text("model"), row.text("accelerator"), row.reading("precision").word)
    engine = "fully sharded" if row.reading("zero_stage").word == "3" else "replicated"
    return (*(text[:200] for text in texts), engine, *(word for word in TASKS if word in task))


def list_openings(row: Row, layout: Layout, batch: Batch) -> Openings:
    """Return what a row leaves open."""
    is_by_operator = keeps_every_second_product(row) or keeps_products(row) or selects_products(row)
    recompute = not is_by_operator and read_recompute(row, 1) is None
    return Openings(recompute, _leaves_zero_open(row) and layout.data > 1, list_microbatches(layout, batch))


_ZERO_FIELDS = ("framework", "schedule", "plan_note", "optimizer", "dp_overlap", "software")
"""Free texts that may name a ZeRO stage."""


def _leaves_zero_open(row: Row) -> bool:
    if row.reading("zero_stage").word or row.states("fsdp_shards"):
        return False
    words = find_words("zero_stage", row.text(*_ZERO_FIELDS))
    return not any(alias[0].isalpha() for word, alias in words.items() if word in ("1", "2", "3"))


def choose_once(drafts: Sequence[Draft]) -> Choice:
    """Return the choice of a sweep, from its runs that ran; the least of all where none did."""
    open_drafts = [draft for draft in drafts if draft.ran and draft.openings.any]
    if not open_drafts:
        return Choice()
    zeros = range(MAX_ZERO + 1) if any(draft.openings.zero for draft in open_drafts) else range(1)
    zero = _find_first(open_drafts, [Choice(zero, LEVELS - 1) for zero in zeros]).zero
    level = _find_first(open_drafts, [Choice(zero, level) for level in range(LEVELS)]).level
    sizes = sorted({size for draft in open_drafts for size in draft.openings.microbatches}, reverse=True)
    return _find_first(open_drafts, [Choice(zero, level, size) for size in sizes])


def _find_first(drafts: Sequence[Draft], choices: Sequence[Choice]) -> Choice:
    """Return the first of ``choices``, each of which needs less memory than the one before, with which all drafts fit.

    A draft that fits with none of them proves nothing. One that fits with a choice fits with all later ones, so that
    every draft is asked about the choice that the drafts before it need.
    """
    known: dict[tuple[Problem, Layout], bool] = {}

    def is_fit(draft: Draft, choice: Choice) -> bool:
        key = (draft.problem, choice.apply(draft))
        if key not in known:
            known[key] = _fits_layout(*key)
        return known[key]

    place = 0
    if len(choices) > 1:
        for draft in drafts:
            if not is_fit(draft, choices[place]) and is_fit(draft, choices[-1]):
                place = next(later for later in range(place + 1, len(choices)) if is_fit(draft, choices[later]))
    return choices[place]


def _fits_layout(problem: Problem, layout: Layout) -> bool:
    try:
        return fits(problem, complete(problem, layout))
    except ValueError:
        return False
