"""The training step of a row: precision, optimizer and gradients."""

import re

from meshwise.scenarios.published.frameworks import is_xla, memory_conventions
from meshwise.scenarios.published.row import Row
from meshwise.scenarios.published.words import is_frozen
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.plan.problem import Training

FOUR_BITS = r"fp4|nvfp|mxfp4|int4"

_PRECISIONS = (
    (FOUR_BITS, "fp8", "for 4 bits, at the rate of 4 bits where the device has one"),
    (r"fp8|float8|e4m3|e5m2|8-bit compute|int8", "fp8", ""),
    (r"bf16|bfloat16|brain", "bf16", ""),
    (r"fp16|float16|half|\bamp\b|mixed|o[12]\b|\bf16", "fp16", ""),
    (r"tf32|tensorfloat", "tf32", ""),
    (r"fp64|double|float64", "fp64", ""),
    (r"fp32|float32|single|full precision|\bf32", "fp32", ""),
)
"""The first match wins, so that ``bf16 compute, fp32 weights`` reads as bf16, the precision of matrix products."""

_FALLBACKS = {
    "fp8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32", "bf16"),
    "fp64": ("fp32",),
    "fp32": ("tf32", "fp16", "bf16"),
}

_OPTIMIZERS = (
    (r"adafactor|came\b", "adafactor", ""),
    (r"lion", "lion", ""),
    (r"muon", "lion", "Muon: one momentum; its orthogonalisation is not simulated"),
    (r"8-?bit|bnb|low-?bit", "adamw", "8-bit states are simulated as 32-bit ones"),
    (r"adam|lamb|adagrad|sophia|shampoo", "adamw", ""),
    (r"sgd|momentum|lars|nesterov", "sgd", ""),
)


def training(row: Row, accelerator: Accelerator, global_batch: int, sequence: int) -> Training:
    """Return the training step of a row, in the nearest precision that its accelerator has."""
    precision = _precision(row, accelerator)
    return Training(
        global_batch,
        sequence,
        precision,
        _optimizer(row),
        gradient_precision=_gradients(row, precision),
        framework=memory_conventions(row),
        frozen=_frozen(row),
        composes_norms=_stated(row, "norm_kernel", ("fused", "eager")),
        gathers_logits=_stated(row, "loss", ("sharded", "gathered")),
    )


def _stated(row: Row, name: str, words: tuple[str, str]) -> bool:
    """Return whether a field has the second of two words; without either word the first is assumed."""
    word = row.text(name)
    if word and word not in words:
        row.assume(f"{name} {word[:40]!r} taken as {words[0]}; known: {', '.join(words)}")
    return word == words[1]


def _frozen(row: Row) -> bool:
    if not is_frozen(row):
        return False
    row.assume("weights are frozen, and adapters count for nothing (LoRA)")
    return True


def _precision(row: Row, accelerator: Accelerator) -> str:
    words = row.text("precision")
    found = next(((name, why) for pattern, name, why in _PRECISIONS if re.search(pattern, words)), None)
    if found is None:
        found = ("bf16", f"precision {words[:40]!r} not known" if words else "not stated")
    name, why = found
    if why:
        row.assume(f"precision {name} ({why})")
    elif words not in (name, f"{name} (not stated)") and (name == "fp8" or "weights" in words):
        row.assume(f"precision {words[:40]} taken as {name}, with what Transformer Engine keeps" if name == "fp8"
                   else f"precision {words[:40]} taken as {name}")  # fmt: skip
    if "not stated" in words:
        row.assume(f"precision {name} (not stated)")
    known = {dtype for dtype, _ in accelerator.peak_flops}
    candidates = (name, *_FALLBACKS[name])
    for candidate in candidates:
        if candidate in known and ("bf16" in known or candidate != "fp8"):
            if candidate != name:
                row.assume(f"precision {candidate}, for {accelerator.name} has no {name}")
            return candidate
    return name


def _optimizer(row: Row) -> str:
    words = row.text("optimizer")
    name, why = next(
        ((name, why) for pattern, name, why in _OPTIMIZERS if re.search(pattern, words)),
        ("adamw", "not stated" if not words else f"{words[:40]!r} not known"),
    )
    if why:
        row.assume(f"optimizer {name} ({why})")
    return name


_GRADIENTS = {"fp32": "fp32", "bf16": "same", "fp16": "same"}
"""Gradient precisions by the words of ``gradient_precision``; "same" is that of the 16-bit matrix products."""


def _gradients(row: Row, precision: str) -> str | None:
    """Return the precision of gradients, or None for the default of the compute precision."""
    words = row.text("plan_note", "precision", "optimizer")
    if precision not in ("bf16", "fp8", "fp16"):
        return None
    stated = row.text("gradient_precision")
    if stated in _GRADIENTS:
        return _GRADIENTS[stated]
    if stated:
        row.assume(f"gradient_precision {stated[:40]!r} not known; nearest: fp32, bf16, fp16")
    if re.search(r"mp mode pure|\bpure\b|grad\w*(?: reduc\w*)? in (bf16|fp16)|(bf16|fp16) (grad|reduc)", words):
        return "same"
    if re.search(r"mp mode default|grad\w*(?: reduc\w*)? in fp32|fp32 (grad|reduc)", words):
        return "fp32"
    if re.search("nemo|bridge", row.text("framework")):
        row.assume("gradients summed in bf16, as NeMo's recipes for performance do (grad_reduce_in_fp32 false)")
        return "same"
    if is_xla(row):
        row.assume("gradients summed in the precision that is computed in, as XLA makes them of weights that are cast")
        return "same"
    row.assume("gradients summed in fp32 with bf16, in their own precision with fp16 (not stated)")
    return None
