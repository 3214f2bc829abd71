"""The run in Megatron-LM's arguments: variables at the top of the script, and what no scenario states of the model.

References
----------
Megatron-LM at core_v0.16.1, ``megatron/training/arguments.py`` (names, and `validate_args`);
``megatron/training/tokenizer/tokenizer.py`` (``_vocab_size_with_padding``: the vocabulary is padded to a multiple of
128 times the tensor ranks unless ``--padded-vocab-size`` states it).
"""

import re
from collections.abc import Iterator
from typing import Any

from meshwise.scenarios.interchange.entry import Entry, Values
from meshwise.scenarios.interchange.facts import Facts, TrainerRequest
from meshwise.scenarios.interchange.lines import ConfigValues, Pair
from meshwise.scenarios.interchange.recipe import (
    BETAS,
    CHECKPOINT_EVERY,
    CHECKPOINTS,
    DATA,
    EPSILON,
    ITERATIONS,
    LEARNING_RATE,
    MIN_LEARNING_RATE,
    SCHEDULE,
    TOKENIZER,
    WARMUP,
    WEIGHT_DECAY,
    find_family,
)

VARIABLES: dict[str, tuple[Any, str]] = {
    "LEARNING_RATE": (LEARNING_RATE, ""),
    "MIN_LEARNING_RATE": (MIN_LEARNING_RATE, ""),
    "SCHEDULE": (SCHEDULE, "or constant, linear, inverse-square-root, WSD"),
    "WARMUP": (WARMUP, "iterations"),
    "ITERATIONS": (ITERATIONS, ""),
    "CHECKPOINTS": (CHECKPOINTS, "a folder that all hosts see"),
    "CHECKPOINT_EVERY": (CHECKPOINT_EVERY, "iterations"),
    "DATA": (DATA, "the prefix of the .bin and .idx files of tools/preprocess_data.py"),
    "TOKENIZER": (TOKENIZER, "a folder or name of a Hugging Face tokenizer"),
}
"""Variables of a script with their values and comments."""

_ARGUMENTS = {
    "--train-iters": "ITERATIONS",
    "--lr": "LEARNING_RATE",
    "--min-lr": "MIN_LEARNING_RATE",
    "--lr-decay-style": "SCHEDULE",
    "--lr-warmup-iters": "WARMUP",
    "--save": "CHECKPOINTS",
    "--load": "CHECKPOINTS",
    "--save-interval": "CHECKPOINT_EVERY",
    "--data-path": "DATA",
    "--tokenizer-model": "TOKENIZER",
}
"""Variables by the argument that has their value."""

_OTHERS: Values = {"--tokenizer-type": "HuggingFaceTokenizer", "--split": "100,0,0", "--eval-iters": 0}
_ADAM: Values = {"--adam-beta1": BETAS[0], "--adam-beta2": BETAS[1], "--adam-eps": EPSILON}
_DECAY, _BASE, _EPSILON, _DEVIATION = "--weight-decay", "--rotary-base", "--norm-epsilon", "--init-method-std"
_VOCABULARY, _PADDED = "--vocab-size", "--padded-vocab-size"

_ASSIGNMENT = re.compile(r"([A-Z_]+)=(\"[^\"$`\\]*\"|[A-Za-z0-9_./:,+-]*)(?:\s+#.*)?")
_REFERENCE = re.compile(r"(--[a-z0-9-]+) \"\$([A-Z_]+)\"")


def _say_vocabulary(facts: Facts) -> Values:
    """Return the size of the model's vocabulary, unless tensor ranks cannot have equal parts of it."""
    vocab = facts["model.vocab"]
    return {} if vocab % facts["plan.tensor"] else {_PADDED: vocab}


def _read_vocabulary(config: ConfigValues) -> Facts:
    if _PADDED in config and config.count(_PADDED) != (vocab := config.count(_VOCABULARY)):
        raise config.build_error(_PADDED, f"is {_VOCABULARY} {vocab}, met {config.count(_PADDED)}")
    return {}


RUN_ENTRIES = (
    Entry((_PADDED,), (), _say_vocabulary, _read_vocabulary),
    Entry((*VARIABLES, *_ARGUMENTS, *_OTHERS, *_ADAM, _DECAY, _BASE, _EPSILON, _DEVIATION), ()),
)
"""Arguments that no field of a scenario expresses; a file may have any values of them."""


def list_variable_lines() -> Iterator[str]:
    """Yield the lines of the variables at the top."""
    yield "# Yours to set."
    for name, (value, comment) in VARIABLES.items():
        yield f"{name}={value}" + (f"  # {comment}" if comment else "")


def list_run_lines(values: Values, request: TrainerRequest) -> Iterator[str]:
    """Yield the lines of arguments that the variables and the published defaults of the model's family give."""
    family = find_family(request.spec)
    yield f"# Published defaults, which the scenario does not state ({family.source})."
    if values.get("--position-embedding-type") == "rope":
        yield f"{_BASE} {family.rotary_base}"
    yield f"{_EPSILON} {family.norm_epsilon}"
    yield f"{_DEVIATION} {family.deviation}"
    yield f"{_DECAY} {WEIGHT_DECAY}"
    adam = {} if values.get("--optimizer") == "sgd" else _ADAM
    yield from (f"{key} {value}" for key, value in (adam | _OTHERS).items())
    yield from (f'{key} "${name}"' for key, name in _ARGUMENTS.items())


def parse_run_line(line: str) -> Pair | None:
    """Return the key and value of a variable, or of an argument that has a variable's value; None for another line.

    >>> parse_run_line("WARMUP=200  # iterations"), parse_run_line('--lr "$LEARNING_RATE"')
    (('WARMUP', '200'), ('--lr', '$LEARNING_RATE'))
    """
    if (match := _ASSIGNMENT.fullmatch(line)) and match[1] in VARIABLES:
        return match[1], match[2]
    if (match := _REFERENCE.fullmatch(line)) and _ARGUMENTS.get(match[1]) == match[2]:
        return match[1], f"${match[2]}"
    return None
