"""A row as a scenario: what it states, what its sweep leaves open, and the nearest problem and plan."""

from dataclasses import replace

from meshwise.scenarios.intervals import FIRST_THAT_FITS, NOT_UNDERSTOOD, with_margin
from meshwise.scenarios.published.machine import build_machine
from meshwise.scenarios.published.network import build_model
from meshwise.scenarios.published.plan import (
    Batch,
    Degrees,
    count_sequence_parts,
    find_nearest,
    read_batch,
    read_degrees,
    read_layout,
    read_sequence,
)
from meshwise.scenarios.published.row import Row
from meshwise.scenarios.published.sweeps import Choice, Draft, choose_once, list_openings
from meshwise.scenarios.published.training import read_training
from meshwise.scenarios.scenario import Scenario, SearchSettings
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.problem import Problem


def draft_scenario(row: Row, place: str, *, ran: bool = True) -> Draft:
    """Return what a row states; raise `Skip`, or another ``ValueError``, where it cannot be simulated.

    ``ran`` says that the run did not lack memory.
    """
    degrees = read_degrees(row)
    row.note_words()
    model = build_model(row)
    has_tokens = isinstance(model, Transformer | Bert | T5)
    length = read_sequence(row, has_fixed_size=not has_tokens)
    batch = read_batch(row, degrees, length)
    degrees, batch = _share_sequences(row, degrees, batch)
    batch = _divide_batch(row, degrees, batch)
    length = _pad_sequence(row, degrees, length)
    cluster = build_machine(row, degrees.devices)
    training = read_training(row, cluster.accelerator, batch.total, length)
    graph = build(model, length, training.dtype)
    if graph.sequence != length:
        row.assume(f"samples of {graph.sequence} tokens, as {model.name} has them")
        training = replace(training, sequence=graph.sequence)
    problem = with_margin(Problem(graph, cluster, training))
    layout = find_nearest(row, problem, read_layout(row, problem, degrees, batch))
    name = row.text("row_id")[:100] or "row"
    return Draft(name, place, problem, model, layout, list_openings(row, layout, batch), tuple(row.assumed), ran)


def finish_scenario(draft: Draft, choice: Choice, sweep: str = "") -> Scenario:
    """Return the scenario of a draft, with what it leaves open as its sweep, named ``sweep``, chose."""
    layout = choice.apply(draft)
    assumed = draft.assumed
    if layout.zero != draft.layout.zero:
        assumed = tuple(line for line in assumed if not line.startswith("zero_stage"))
        reason = f"with {draft.layout.zero} the states of runs that ran do not fit"
        assumed += (f"zero_stage {layout.zero}, for {reason}: {FIRST_THAT_FITS}{sweep}",)
    if draft.openings.recompute or len(draft.openings.microbatches) > 1:
        assumed += (f"recompute {layout.recompute}, micro_batch {layout.microbatch}: {FIRST_THAT_FITS}{sweep}",)
    plan = complete(draft.problem, layout)
    return Scenario(draft.name, draft.place, draft.problem, draft.model, plan, SearchSettings(), None, assumed)


def build_scenario(row: Row, place: str) -> Scenario:
    """Return the scenario of a row that is a sweep of its own.

    Raises
    ------
    ValueError
        Where it cannot be made; a `Skip` names the field.
    """
    draft = draft_scenario(row, place)
    return finish_scenario(draft, choose_once([draft]))


def _share_sequences(row: Row, degrees: Degrees, batch: Batch) -> tuple[Degrees, Batch]:
    """Return degrees and batch with context parallelism, where there are fewer sequences than data ranks."""
    parts = count_sequence_parts(row)
    if parts == 1 and batch.total < degrees.data and degrees.data % batch.total == 0:
        parts = degrees.data // batch.total
    if parts == 1 or degrees.data % parts:
        return degrees, batch
    row.assume(f"context parallel over {parts} ranks, for a rank has 1/{parts} of a sequence")
    return degrees._replace(data=degrees.data // parts, context=degrees.context * parts), batch._replace(micro=1)


def _pad_sequence(row: Row, degrees: Degrees, length: int) -> int:
    """Return the least length, from the stated one on, that context ranks can share."""
    if length % degrees.context == 0:
        return length
    padded_length = -(-length // degrees.context) * degrees.context
    row.assume(f"seq_len {padded_length}, for cp({degrees.context}) does not divide {length}")
    return padded_length


def _divide_batch(row: Row, degrees: Degrees, batch: Batch) -> Batch:
    """Return the batch nearest to the stated one that data ranks and microbatches divide; raise `Skip` without one."""
    micro = batch.micro or 1
    if batch.micro is not None and batch.total % (degrees.data * micro) and batch.total % degrees.data == 0:
        rank_batch = batch.total // degrees.data
        rank_microbatch = max(count for count in range(1, min(micro, rank_batch) + 1) if rank_batch % count == 0)
        row.assume(f"micro_batch {rank_microbatch}, for {micro} does not divide the {rank_batch} sequences of a rank")
        return batch._replace(micro=rank_microbatch)
    sequences = degrees.data * micro
    accumulation_steps = row.optional_count("grad_accum")
    if batch.micro is not None and accumulation_steps is not None and batch.total != sequences * accumulation_steps:
        reason = f"global_batch({batch.total}) is not {sequences} * {accumulation_steps}"
        row.assume(f"grad_accum {batch.total / sequences:g}, for {reason}")
    if batch.total % sequences == 0:
        return batch
    total = sequences * max(1, round(batch.total / sequences))
    doubt = "" if 0.5 <= total / batch.total <= 2 else f"; which of them is meant {NOT_UNDERSTOOD}"
    row.assume(
        f"global_batch {total}, for dp({degrees.data}) * micro_batch({micro}) do not divide {batch.total}{doubt}"
    )
    return batch._replace(total=total)
