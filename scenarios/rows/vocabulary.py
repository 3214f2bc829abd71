"""Tokens of a row's vocabulary."""

import re

from scenarios.rows.frameworks import is_megatron
from scenarios.rows.row import Row

MEGATRON_VOCAB_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times the tensor degree (--make-vocab-size-divisible-by)."""

_FAMILIES = (
    (r"llama-?_? ?3|llama-?4", 128256), (r"llama|mi[sx]tral", 32000), (r"qwen", 151936), (r"gemma|nemotron", 256000),
    (r"deepseek", 102400), (r"opt\b|opt-", 50272), (r"mpt", 50368), (r"bloom", 250880),
)  # fmt: skip
_GPT = 51200
"""Of GPT-2's tokens, padded as in Narayanan et al. 2021, section 5."""


def of_family(row: Row, words: str) -> int:
    """Return the vocabulary that models of a family have."""
    vocab = next((size for pattern, size in _FAMILIES if re.search(pattern, words)), _GPT)
    row.assume(f"vocab {vocab} (not stated; of the family)")
    return vocab


def padded(row: Row, vocab: int) -> int:
    """Return a vocabulary that tensor ranks divide; Megatron-LM pads always."""
    tensor = row.count("tp") or 1
    multiple = MEGATRON_VOCAB_MULTIPLE * tensor
    if vocab % tensor == 0 and not (is_megatron(row) and "deepspeed" not in row.text("framework") and vocab % multiple):
        return vocab
    more = -(-vocab // multiple) * multiple
    row.assume(f"vocabulary padded to {more}, a multiple of {multiple}, as Megatron-LM does")
    return more
