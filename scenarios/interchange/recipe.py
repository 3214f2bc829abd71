"""What a launch file states besides the plan: how weights begin, how fast they learn, and where data and results lie.

A scenario says none of it, because none of it changes a step's time or memory. Of the model, the published defaults of
its family are written, with their source; the rest are variables at the top of a file, for users to set.
"""

from dataclasses import dataclass

from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.problem import Training

LEARNING_RATE, MIN_LEARNING_RATE, SCHEDULE = 3e-4, 3e-5, "cosine"
"""The largest rate, the one at the end, and the curve between; the largest is that of the Llama 3 8B model
(Grattafiori et al. 2024, table 3)."""

ITERATIONS, WARMUP, CHECKPOINT_EVERY = 1000, 100, 500
"""Steps of the run, those of them in which the rate rises linearly, and those between two checkpoints."""

WEIGHT_DECAY, BETAS, EPSILON = 0.1, (0.9, 0.95), 1e-8
"""AdamW as in Brown et al. 2020, appendix B."""

CLIPPING = 1.0
"""The largest norm of gradients where they are clipped."""

CHECKPOINTS, DATA, TOKENIZER = "checkpoints", "TRAINING_DATA", "TOKENIZER"
"""The folder of checkpoints, and placeholders for the paths of data and tokenizer."""


@dataclass(frozen=True, slots=True)
class Family:
    """The published defaults of a family of models.

    Parameters
    ----------
    rotary_base
        Base of the frequencies of rotary positions.
    norm_epsilon
        What norms add to the variance.
    deviation
        Standard deviation of initial weights.
    source
        Where these values are published.
    """

    rotary_base: int
    norm_epsilon: float
    deviation: float
    source: str


_LLAMA_2 = Family(10_000, 1e-5, 0.02, "config.json of meta-llama/Llama-2-7b-hf")
_LLAMA_3 = Family(500_000, 1e-5, 0.02, "config.json of meta-llama/Meta-Llama-3-8B")
_QWEN_3 = Family(1_000_000, 1e-6, 0.02, "config.json of Qwen/Qwen3-8B")
_GPT = Family(10_000, 1e-5, 0.02, "config.json of openai-community/gpt2")
_FAMILIES = {
    "llama2": _LLAMA_2,
    "llama3": _LLAMA_3,
    "mistral": Family(10_000, 1e-5, 0.02, "config.json of mistralai/Mistral-7B-v0.1"),
    "mixtral": Family(1_000_000, 1e-5, 0.02, "config.json of mistralai/Mixtral-8x7B-v0.1"),
    "deepseek": Family(10_000, 1e-6, 0.006, "DeepSeek-AI 2024, DeepSeek-V2, section 3.1.2, and its config.json"),
    "qwen2": Family(1_000_000, 1e-6, 0.02, "config.json of Qwen/Qwen2-7B"),
    "qwen3": _QWEN_3,
}
_LLAMA_3_VOCABULARY = 128_256


def find_family(spec: Model) -> Family:
    """Return the defaults of a model: by its name; else Llama 3 by its vocabulary, or by its norms.

    >>> from meshwise.simulator.models.presets import MODELS
    >>> find_family(MODELS["llama3-8b"]).rotary_base, find_family(MODELS["gpt3-175b"]).norm_epsilon
    (500000, 1e-05)
    """
    for name, family in _FAMILIES.items():
        if spec.name.startswith(name):
            return family
    if not isinstance(spec, Transformer) or (spec.norm or spec.ffn_kind) in ("layer", "gelu"):
        return _GPT
    if spec.vocab == _LLAMA_3_VOCABULARY:
        return _LLAMA_3
    return _QWEN_3 if spec.qk_norm else _LLAMA_2


def describe_clipping(training: Training, trainer: str, default: float) -> str:
    """Return in words why gradients are clipped or not, and the trainer's own default."""
    reason = "as the scenario says" if training.gradient_clipping else "nothing is clipped, as in the scenario"
    return f"{reason}; {trainer}'s own default is {default}"
