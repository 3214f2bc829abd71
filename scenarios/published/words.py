"""A row's words for schedule, offloading and attention, as choices of the simulator."""

import re

from meshwise.scenarios.published.row import Row
from meshwise.scenarios.published.vocabulary.reading import find_words
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.parallelism import Attention

FOUR_BITS = "fp4"
"""The known word for numbers of 4 bits."""

TWO_CHUNKS = ("zbv", "dualpipev")
LOOPED = ("interleaved", "looped_bfs", "interleaved_zero_bubble")
_NEAREST = {"dualpipe": "dualpipev"}
"""The nearest schedule that is simulated, by published schedule."""


def read_schedule(row: Row, pipeline: int, chunks: int) -> tuple[str, int]:
    """Return the schedule of a row and the number of model chunks on a rank."""
    if pipeline == 1:
        return "1f1b", 1
    name = row.read_word("schedule", "1f1b")
    if name == "none":
        row.assume("schedule 1f1b (not stated)")
        name = "1f1b"
    if name in _NEAREST:
        name = _NEAREST[name]
        row.assume(f"schedule {name} (the nearest schedule that is simulated)")
    if name in TWO_CHUNKS:
        return name, 2
    if chunks > 1 and name == "1f1b":
        return "interleaved", chunks
    if chunks > 1 and name == "zb1p":
        row.assume("schedule interleaved_zero_bubble, for there are several chunks")
        return "interleaved_zero_bubble", chunks
    if name in LOOPED and chunks == 1:
        if row.states("vpp"):
            row.assume(f"schedule 1f1b, for {name} with vpp 1 is no more")
            return "1f1b", 1
        row.assume("vpp 2 instead, for the schedule is interleaved")
        return name, 2
    return name, chunks if name in LOOPED else 1


def read_offload(row: Row) -> Offloading:
    """Return which states a row offloads to host memory; ZeRO's parameters take the optimizer's states with them."""
    if row.read_word("offload") in ("", "none"):
        return NO_OFFLOADING
    text = row.text("offload")
    percent_match = re.search(r"(\d+(?:\.\d+)?) ?%", text)
    fractions = (min(max(float(percent_match[1]) / 100, 0.01), 1.0) if percent_match else 1.0,)
    words = find_words("offload", text)
    parameters = fractions if "parameters" in words else ()
    activations = fractions if "activations" in words else ()
    optimizer = fractions if parameters or "optimizer" in words else ()
    if not (optimizer or parameters or activations):
        row.assume(f"offload nothing: {text[:60]!r} is not simulated")
        return NO_OFFLOADING
    return Offloading(optimizer, parameters, activations)


_CONTEXT_FIELDS = ("cp_comm_type", "attention_kernel", "plan_note", "framework")
"""Fields that may say how context ranks attend."""


def read_attention(row: Row, context: int) -> Attention:
    """Return the attention algorithm of context parallel ranks."""
    if context == 1:
        return Attention.RING
    for word, attention in (("ulysses", Attention.ULYSSES), ("all_gather", Attention.ALL_GATHER)):
        if row.says(word, *_CONTEXT_FIELDS):
            return attention
    if not row.says("ring", *_CONTEXT_FIELDS):
        row.assume("context parallel attention by a ring (not stated)")
    return Attention.RING


def is_frozen(row: Row) -> bool:
    """Return whether most weights are frozen, as with LoRA."""
    if not row.says("frozen", "model", "plan_note", "arch"):
        return False
    row.assume("weights are frozen, and adapters count for nothing (LoRA)")
    return True
