"""Recomputation: which forward activations are dropped and computed again in the backward pass.

A stage has one of three choices: a `Recompute` for all layers, one for its first layers, or the
names of operators in all layers. Each choice has ``layer``, what is computed again in a layer
that is recomputed, and ``layers``, how many layers of a stage are, ``None`` for all. A plan has
one choice for all stages, or one per stage.

References
----------
Chen et al. 2016, "Training deep nets with sublinear memory cost" (full); Korthikanti et
al. 2022, "Reducing activation recomputation in large transformer models" (selective);
Megatron-LM, ``--recompute-method block`` with ``--recompute-num-layers`` (the first layers of
every model chunk) and ``--recompute-modules`` (parts of a layer).
"""

from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from itertools import groupby
from reprlib import Repr
from typing import Any

HOOK_LAUNCHES = 2
"""Host time that checkpointing adds per recomputed operator, in kernel launches: torch's checkpoint hooks the tensors
that an operator keeps, forward and backward, in Python, 28 us per operator where a launch takes 14 (core, torch
2.13)."""


class Recompute(StrEnum):
    """What is computed again in a layer: nothing, the attention core, or everything."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"

    @property
    def layer(self) -> "Recompute":
        """What is computed again of a layer that is recomputed."""
        return self

    @property
    def layers(self) -> None:
        """How many layers of every stage are recomputed; ``None`` for all."""
        return None

    @property
    def document(self) -> str:
        """The same as plain data."""
        return self.value


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The first ``layers`` layers of every stage (every chunk) are recomputed; the others keep all activations."""

    layer: Recompute
    layers: int

    def __post_init__(self) -> None:
        if self.layer is Recompute.NONE:
            raise ValueError("recompute of some layers is full or selective, met none; nearest: none for all of them")
        if self.layers < 1:
            raise ValueError(f"recompute of some layers has at least 1 of them, met {self.layers}; nearest: none")

    def __str__(self) -> str:
        return f"{self.layer} ({self.layers} layers a stage)"

    @property
    def document(self) -> dict[str, int]:
        """The same as plain data."""
        return {self.layer.value: self.layers}


HALF = "/2"
"""What follows the name of an operator of which half is computed again."""


@dataclass(frozen=True, slots=True)
class SomeOperators:
    """The operators named ``names`` are computed again in every layer.

    ``up/2`` computes half of the result of the product ``up`` again, and keeps the other half.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("recompute of operators names at least one, met none; nearest: none")
        if len(self.operators) < len(self.names):
            operators = [name.removesuffix(HALF) for name in self.names]
            repeated_name = next(name for name in operators if operators.count(name) > 1)
            raise ValueError(f"recompute names each operator once, met {repeated_name} twice")

    def __str__(self) -> str:
        return " + ".join(self.names)

    @property
    def operators(self) -> frozenset[str]:
        """The names of all operators of which something is computed again."""
        return frozenset(name.removesuffix(HALF) for name in self.names)

    @property
    def halved_operators(self) -> frozenset[str]:
        """The names of the operators of which half is computed again."""
        return frozenset(name.removesuffix(HALF) for name in self.names if name.endswith(HALF))

    @property
    def layer(self) -> "SomeOperators":
        """What is computed again of a layer that is recomputed."""
        return self

    @property
    def layers(self) -> None:
        """How many layers of every stage are recomputed; ``None`` for all."""
        return None

    @property
    def document(self) -> dict[str, list[str]]:
        """The same as plain data."""
        return {"operators": list(self.names)}


LayerRecompute = Recompute | SomeOperators
"""What may be computed again in one layer."""

StageRecompute = Recompute | FirstLayers | SomeOperators
"""What may be computed again in one stage."""


@dataclass(frozen=True, slots=True)
class PerStage:
    """A choice for every stage: ``stages[i]`` is that of stage ``i``; every chunk of a rank is a stage."""

    stages: tuple[StageRecompute, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("recompute of stages says something of each, met none; nearest: none for all of them")

    def __str__(self) -> str:
        stretches = [(recompute_choice, len(list(stretch))) for recompute_choice, stretch in groupby(self.stages)]
        return ", ".join(
            f"{recompute_choice} on {count} stage{'s' if count > 1 else ''}" for recompute_choice, count in stretches
        )

    @property
    def document(self) -> list[Any]:
        """The same as plain data."""
        return [recompute_choice.document for recompute_choice in self.stages]


Recomputation = StageRecompute | PerStage
"""The recomputation of a plan: one choice for all stages, or one per stage."""


def find_stage_recompute(recompute_choice: Recomputation, stage: int) -> StageRecompute:
    """Return the recompute choice of a stage.

    >>> find_stage_recompute(PerStage((Recompute.FULL, Recompute.NONE)), 1)
    <Recompute.NONE: 'none'>
    """
    return recompute_choice.stages[stage] if isinstance(recompute_choice, PerStage) else recompute_choice


def recomputation(document: Any) -> Recomputation:
    """Return the recomputation of a document: a word, ``{full: 12}``, ``{selective: 12}`` or ``{operators: [...]}``.

    A list has one of these for every stage.

    >>> recomputation("activation")
    SomeOperators(names=('activation',))
    >>> recomputation({"full": 12})
    FirstLayers(layer=<Recompute.FULL: 'full'>, layers=12)

    Raises
    ------
    ValueError
        Where the document is none of these.
    """
    return PerStage(tuple(map(_parse_stage, document))) if isinstance(document, list) else _parse_stage(document)


MOST_DIGITS = 6
"""Digits of a number of layers in words, at most."""


def parse_words(text: str) -> Recomputation:
    """Return the recomputation of words: ``none``, ``full`` or ``selective``, and of how many layers of every stage.

    A number alone is of layers that are computed again in full. Stages that differ have ``+`` between them.

    >>> parse_words("2")
    FirstLayers(layer=<Recompute.FULL: 'full'>, layers=2)
    >>> parse_words("selective:1+none")
    PerStage(stages=(FirstLayers(layer=<Recompute.SELECTIVE: 'selective'>, layers=1), <Recompute.NONE: 'none'>))

    Raises
    ------
    ValueError
        Where they are none of these.
    """
    stages = tuple(map(_parse_word, text.split("+")))
    return stages[0] if len(stages) == 1 else PerStage(stages)


def _parse_word(text: str) -> StageRecompute:
    kind, _, number = text.partition(":")
    if kind.isascii() and kind.isdecimal() and not number:
        kind, number = Recompute.FULL, kind
    is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
    if kind not in list(Recompute) or (":" in text and not number) or (number and not is_number):
        matches = get_close_matches(kind, list(Recompute), n=1)
        raise ValueError(
            f"recompute is {', '.join(Recompute)}, a number of layers a stage, or full:2 or selective:2 with it, met "
            f"{text!r}; nearest: {matches[0] if matches else Recompute.FULL}"
        )
    return FirstLayers(Recompute(kind), int(number)) if number else Recompute(kind)


def write_words(recompute_choice: Recomputation) -> str:
    """Return the words of `parse_words`.

    >>> write_words(PerStage((FirstLayers(Recompute.FULL, 2), Recompute.NONE)))
    'full:2+none'
    """
    stages = recompute_choice.stages if isinstance(recompute_choice, PerStage) else (recompute_choice,)
    return "+".join(f"{stage.layer}:{stage.layers}" if stage.layers else str(stage) for stage in stages)


ACTIVATION = "activation"
"""The word for the activation functions of feed-forward layers alone: cheap to compute again, and large to keep."""


def _parse_stage(document: Any) -> StageRecompute:
    if document == ACTIVATION:
        return SomeOperators((ACTIVATION,))
    if isinstance(document, str) and document in list(Recompute):
        return Recompute(document)
    # type() and not isinstance: a YAML true is an int in Python
    if isinstance(document, dict) and len(document) == 1:
        ((key, value),) = document.items()
        if key in ("full", "selective") and type(value) is int:
            return FirstLayers(Recompute(key), value)
        if key == "operators" and isinstance(value, list) and all(isinstance(name, str) for name in value):
            return SomeOperators(tuple(value))
    words = ", ".join((*Recompute, ACTIVATION))
    matches = get_close_matches(document, [*Recompute, ACTIVATION], n=1) if isinstance(document, str) else []
    hint = f"; nearest: {matches[0]}" if matches else ""
    raise ValueError(
        f"recompute is one of {words}, {{full: layers a stage}}, {{selective: layers a stage}}, "
        f"{{operators: [names]}} and a list of these, met {Repr().repr(document)}{hint}"
    )
