"""What a user's script does besides a file: the model and the run, in the words of transformers.

DeepSpeed and Accelerate read neither from their files. The files state them all the same, for a script to read or
follow: the model in the words of a ``config.json``, the run in those of ``transformers.TrainingArguments``.

References
----------
transformers 5: ``TrainingArguments``, ``LlamaConfig``, ``Qwen3MoeConfig``.
"""

from typing import Any

from meshwise.scenarios.interchange.entry import Entry, Values
from meshwise.scenarios.interchange.facts import MODEL, Facts, TrainerRequest
from meshwise.scenarios.interchange.lines import ConfigValues
from meshwise.scenarios.interchange.recipe import (
    BETAS,
    CHECKPOINT_EVERY,
    CHECKPOINTS,
    CLIPPING,
    DATA,
    EPSILON,
    ITERATIONS,
    LEARNING_RATE,
    SCHEDULE,
    TOKENIZER,
    WARMUP,
    WEIGHT_DECAY,
    find_family,
)
from meshwise.simulator.models.experts import Experts

_MODEL_WORDS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied_embeddings",
    "positions": "positions",
    "norm": "norm",
    "feed_forward": "ffn_kind",
    "biases": "biases",
}
_EXPERT_WORDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_FAMILY_WORDS = ("rope_theta", "norm_epsilon", "initializer_range", "family")
_RUN_WORDS = ("max_steps", "output_dir", "save_steps", "data", "tokenizer")
_RATE_WORDS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
)
_SEQUENCE, _CLIPPING = "script.sequence_length", "script.max_grad_norm"
_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}


def _say_model(facts: Facts) -> Values:
    experts: Experts | None = facts["model.experts"]
    values = {f"script.{word}": facts[f"model.{name}"] for word, name in _MODEL_WORDS.items()}
    if experts:
        sizes = (experts.count, experts.top_k, experts.ffn)
        values |= {f"script.{word}": size for word, size in zip(_EXPERT_WORDS, sizes, strict=True)}
    return {key: value for key, value in values.items() if value is not None}


def _read_model(config: ConfigValues) -> Facts:
    stated = {name: config.get(f"script.{word}") for word, name in _MODEL_WORDS.items() if f"script.{word}" in config}
    return {f"model.{name}": value for name, value in stated.items()}


def _read_clipping(config: ConfigValues) -> Facts:
    if _CLIPPING not in config:
        return {}
    value = config.get(_CLIPPING)
    if type(value) not in (int, float) or not value >= 0:
        raise config.build_error(_CLIPPING, "is the largest norm of gradients, a number above 0, or 0 for no clipping")
    return {"training.gradient_clipping": value > 0}


MODEL_OF_SCRIPT = Entry(
    tuple(f"script.{word}" for word in (*_MODEL_WORDS, *_EXPERT_WORDS)),
    tuple(name for name in MODEL if name != "model.name"),
    _say_model,
    _read_model,
)
"""The model: what a file states of it has to be that of the scenario, but for experts, which are not compared."""

SEQUENCE_OF_SCRIPT = Entry(
    (_SEQUENCE,),
    ("training.sequence",),
    lambda facts: {_SEQUENCE: facts["training.sequence"]},
    lambda config: {"training.sequence": config.count(_SEQUENCE)} if _SEQUENCE in config else {},
)
CLIPPING_OF_SCRIPT = Entry(
    (_CLIPPING,),
    ("training.gradient_clipping",),
    lambda facts: {_CLIPPING: CLIPPING if facts["training.gradient_clipping"] else 0.0},
    _read_clipping,
)
RUN_OF_SCRIPT = Entry(tuple(f"script.{word}" for word in (*_FAMILY_WORDS, *_RUN_WORDS, *_RATE_WORDS)), ())
"""What no field of a scenario states; a file may have any values of it."""


def build_run(request: TrainerRequest) -> Values:
    """Return the run and the published defaults of the model's family, by dotted key."""
    family = find_family(request.spec)
    run = (ITERATIONS, CHECKPOINTS, CHECKPOINT_EVERY, DATA, TOKENIZER)
    defaults = (family.rotary_base, family.norm_epsilon, family.deviation, family.source)
    words: dict[str, Any] = dict(zip((*_RUN_WORDS, *_FAMILY_WORDS), (*run, *defaults), strict=True))
    if getattr(request.spec, "positions", "") != "rotary":
        del words["rope_theta"]
    return {f"script.{word}": value for word, value in words.items()}


def build_rates(request: TrainerRequest) -> Values:
    """Return how weights learn in the words of ``TrainingArguments``, by dotted key."""
    optimizer = _OPTIMIZERS.get(request.problem.training.optimizer)
    rates = (LEARNING_RATE, SCHEDULE, WARMUP, WEIGHT_DECAY, *BETAS, EPSILON, optimizer)
    words = dict(zip(_RATE_WORDS, rates, strict=True))
    return {f"script.{word}": value for word, value in words.items() if value is not None}
