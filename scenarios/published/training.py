"""The training step of a row: precision, optimizer and gradients."""

import re

from meshwise.scenarios.published.frameworks import find_entry, gathers_logits, list_composed, memory_conventions
from meshwise.scenarios.published.row import Row
from meshwise.scenarios.published.vocabulary.reading import find_words
from meshwise.scenarios.published.words import FOUR_BITS, is_frozen
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.plan.problem import Training

_FALLBACKS = {
    "fp8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32", "bf16"),
    "fp64": ("fp32",),
    "fp32": ("tf32", "fp16", "bf16"),
}

_OPTIMIZERS = {
    "muon": ("lion", "Muon: one momentum; its orthogonalisation is not simulated"),
    "adamw_16bit": ("adamw", ""),
    "adamw_8bit": ("adamw", ""),
}
"""The nearest optimizer that is simulated, with what it lacks, by published optimizer."""


def read_training(row: Row, accelerator: Accelerator, global_batch: int, sequence: int) -> Training:
    """Return the training step of a row, in the nearest precision that its accelerator has."""
    precision, state_precision = _read_precision(row, accelerator), _read_state_precision(row)
    return Training(
        global_batch,
        sequence,
        precision,
        _read_optimizer(row),
        gradient_precision=_read_gradient_precision(row, precision, state_precision),
        state_precision=state_precision,
        framework=memory_conventions(row),
        fp8_scaling=_read_scaling(row) if precision == "fp8" else None,
        frozen=is_frozen(row),
        composed=list_composed(row),
        gathers_logits=gathers_logits(row),
    )


def _read_optimizer(row: Row) -> str:
    word = row.read_word("optimizer", "adamw")
    name, reason = _OPTIMIZERS.get(word, (word, ""))
    if reason:
        row.assume(f"optimizer {name} ({reason})")
    return name


_STATES_OF_OPTIMIZERS = {"adamw_16bit": "same", "adamw_8bit": "int8"}
"""Precisions of moments by the words of ``optimizer``, wherever in its text they stand."""


_SCALINGS = {"rowwise": "row", "tensorwise": "tensor", "delayed scaling": "delayed"}
"""Scales of casts to fp8 by words of ``precision``."""


def _read_scaling(row: Row) -> str | None:
    """Return how casts to fp8 find their scales where the precision says it."""
    for word, alias in find_words("fp8_scaling", row.text("precision")).items():
        row.assume(f"scales of casts to fp8 by {_SCALINGS[word]} (from precision: {alias!r})")
        return _SCALINGS[word]
    return None


def _read_state_precision(row: Row) -> str:
    """Return the precision of the optimizer's moments: fp32 where nothing is said."""
    if stated_precision := row.read_word("state_precision"):
        return stated_precision
    words = find_words("optimizer", row.text("optimizer"))
    for word, precision in _STATES_OF_OPTIMIZERS.items():
        if word in words:
            what = "8-bit moments" if precision == "int8" else "moments as precise as the weights, no main weights"
            row.assume(f"{what} (from optimizer: {words[word]!r})")
            return precision
    return "fp32"


def _read_precision(row: Row, accelerator: Accelerator) -> str:
    words = row.text("precision")
    name = row.read_word("precision", "bf16")
    if name == FOUR_BITS:
        name = "fp8"
        row.assume("precision fp8 (for 4 bits, at the rate of 4 bits where the device has one)")
    elif words not in (name, f"{name} (not stated)") and (name == "fp8" or "weights" in words):
        suffix = ", with what Transformer Engine keeps" if name == "fp8" else ""
        row.assume(f"precision {words[:40]} taken as {name}{suffix}")
    if "not stated" in words:
        row.assume(f"precision {name} (not stated)")
    device_precisions = {dtype for dtype, _ in accelerator.peak_flops}
    for candidate in (name, *_FALLBACKS[name], "bf16", "fp16", "tf32", "fp32"):
        if candidate in device_precisions and ("bf16" in device_precisions or candidate != "fp8"):
            if candidate != name:
                row.assume(f"precision {candidate}, for {accelerator.name} has no {name}")
            return candidate
    return name


_GRADIENTS = {"fp32": "fp32", "bf16": "same", "fp16": "same"}
"""Gradient precisions by the words of ``gradient_precision``; "same" is that of the 16-bit matrix products."""


def _read_gradient_precision(row: Row, precision: str, state_precision: str) -> str | None:
    """Return the precision of gradients, or None for the default of the compute precision."""
    words = row.text("plan_note", "precision", "optimizer")
    if precision not in ("bf16", "fp8", "fp16"):
        return None
    if (stated_precision := row.read_word("gradient_precision")) in _GRADIENTS:
        return _GRADIENTS[stated_precision]
    if re.search(r"mp mode pure|\bpure\b|grad\w*(?: reduc\w*)? in (bf16|fp16)|(bf16|fp16) (grad|reduc)", words):
        return "same"
    if re.search(r"mp mode default|grad\w*(?: reduc\w*)? in fp32|fp32 (grad|reduc)", words):
        return "fp32"
    if state_precision == "same":
        row.assume("gradients summed in the precision of the weights, as their moments (not stated)")
        return "same"
    default = find_entry(row).defaults.gradient_precision
    how = {"same": "the precision that is computed in", "fp32": "fp32"}
    plain = "fp32 with bf16, in their own precision with fp16"
    row.assume(f"gradients summed in {how.get(default or '', plain)} (not stated; {row.text('framework')[:40]})")
    return default
