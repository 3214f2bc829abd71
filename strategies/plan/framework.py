"""What training frameworks do beyond the algorithm: one table of conventions and defaults, each with its source.

The table is ``frameworks.json``. An entry has the conventions by which steps are priced (`Framework`), what the
framework does where nobody says otherwise (`Defaults`), the names under which it is known, and for every figure the
file that it was read from; "not read" marks those that were not. An entry that is ``like`` another has all that the
other has and it does not say itself.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from meshwise.simulator.brief import brief_repr

TABLE = "frameworks.json"


@dataclass(frozen=True, slots=True)
class Framework:
    """Conventions of one framework; without a value a flag is off and a size 0.

    Parameters
    ----------
    logits_in_precision
        Whether logits stay in the dtype of the product that makes them; otherwise they are kept in fp32.
    loss_copies
        Extra copies of the logits that the loss makes in each pass, beside the logits that it keeps and their
        gradient: with the whole vocabulary, and with a cut vocabulary. ``None`` where the gradient overwrites the
        logits.
    casts_logits
        Whether logits in the dtype of the product lie beside those in fp32 during the loss, and so do their gradients.
    copies_probabilities
        Whether backward of the loss copies the probabilities before it takes 1 from those of the targets, as
        ``torch.compile`` does, where otherwise the gradient overwrites them.
    keeps_gathered
        Whether a product keeps its input gathered along the tensor axis; otherwise it keeps its shard and gathers
        it again in backward.
    fused_gradients
        Whether products add weight gradients straight to the accumulated gradients.
    whole_table
        Whether backward of an embedding with cut rows makes the gradient of all rows.
    dummy_gradients
        Whether a product returns a weight gradient that nothing reads: one per shape, never freed.
    gather_buffer
        Whether the gathered input of the last product has its own buffer, which is never freed.
    workspace, grouped_workspace, other_workspace
        Bytes that stay allocated as scratch memory of products: on every rank, for products of experts, and for
        products outside the framework's own layers (the last product and a router's).
    routed_copies
        Copies of the experts' results that exist while the results are combined.
    keeps_results
        Whether combining keeps the experts' results; otherwise the weights are applied in the experts' activation.
    keeps_gates
        Whether a gated activation keeps the activated gate beside its inputs, because one operator makes the gate and
        another multiplies by it. Otherwise one kernel does both and makes the gate again in backward.
    routing_bytes
        Bytes kept for every pair of a token and an expert, beside the probability in fp32.
    buffers_every_microbatch
        Whether a stage has receive buffers for every microbatch of a step and keeps what it sends until backward;
        otherwise it has the buffers of the current microbatch.
    late_biases
        Whether the bias of a product whose sum is scattered along the sequence is added to the scattered part, so
        that each tensor rank has the bias gradient of its own tokens; otherwise it is added to the sum.
    flattens_gradients
        Whether gradients are copied into one piece before they are summed: the gradients of a bucket with ZeRO 2 and
        3, and all gradients that are summed after the last backward.
    drops_gradients
        Whether the memory of gradients is freed once the optimizer has read them
        (`meshwise.strategies.lowering.costs.optimizer`).
    keeps_graph
        Whether a split backward keeps everything that forward kept, except what the loss kept, until the weight
        gradients are made; a first stage, whose input has no gradient, then does all of backward at that time.
    adds_gradients
        Whether separate kernels add the gradients of a microbatch to the gradients of the earlier microbatches
        (`meshwise.strategies.lowering.costs.rewrites`).
    hides_input_gradients
        Whether tensor ranks sum the input gradient of a column-parallel product while the product for its weight
        gradient runs (`meshwise.strategies.lowering.costs.rewrites`).
    waits_for_exchanges
        Whether the host of a pipeline stage launches nothing of a pass before its input has been received and
        everything before it has ended.
    recomputes_unread
        Whether a recomputed layer runs to its end even where backward does not read the result: the last product and
        what follows it.
    keeps_remainders
        Whether the optimizer keeps only the half of the fp32 main weights that the bf16 weights lack.
    keeps_shards
        Whether a rank that shares states with ZeRO 2 or 3 keeps parameter shards in the precision of the states: with
        ZeRO 2 beside the whole parameters; with 16-bit parameters the shards are the main weights, and no other shard
        is kept.
    keeps_quantised
        Whether fp8 copies of weights are kept through a step; otherwise each product casts its own.
    quantised_parameters
        Whether weights that layers multiply by in fp8 are kept and gathered in fp8 alone.
    waits_for_passes
        Whether hosts also wait for passes where there is no pipeline.
    waits_for_collectives
        Whether a host launches nothing before a collective inside a pass has ended.
    steps_together
        Whether the optimizer's step makes a temporary tensor for every parameter at once, in the precision of the
        states: the roots of AdamW's second moments.
    widens_gradients
        Whether the optimizer's step copies 16-bit gradients to fp32.
    shares_weights
        Whether data ranks gather and reduce each weight by itself, where it is read and where its gradient is made,
        instead of all weights of a block together.
    scales_apart
        Whether a cast to fp8 is three kernels: one finds the largest value of the tensor, one casts, one copies to the
        other layout. Otherwise one kernel casts and transposes, with a scale of earlier steps (delayed scaling).
    loops_experts
        Whether experts run one by one, each launched by the host, instead of as one group.
    waits_in_attention
        Whether the host waits for the device before every fused attention, to read a length.
    checkpoint_launches
        Operators' worth of host time in which the random state is kept and set back for a recomputed region.
    composes_ring
        Whether ring attention is torch's: keys and values go round once for every query head, each part of the result
        is merged by several kernels in fp32, and gradients of keys and values go round in fp32.
    composed
        Kinds of operators that are composed of torch's operators. RMS norms then keep ``x.float()`` and
        ``(x * rsqrt).to(bf16)`` for backward instead of the input, and a softmax its result in fp32.
    """

    name: str
    loss_copies: tuple[int, int] | None
    routed_copies: int
    logits_in_precision: bool = False
    casts_logits: bool = False
    copies_probabilities: bool = False
    keeps_gathered: bool = False
    fused_gradients: bool = False
    whole_table: bool = False
    dummy_gradients: bool = False
    gather_buffer: bool = False
    workspace: int = 0
    grouped_workspace: int = 0
    other_workspace: int = 0
    keeps_results: bool = False
    keeps_gates: bool = False
    routing_bytes: int = 0
    buffers_every_microbatch: bool = False
    late_biases: bool = False
    flattens_gradients: bool = False
    drops_gradients: bool = False
    keeps_graph: bool = False
    adds_gradients: bool = False
    hides_input_gradients: bool = False
    waits_for_exchanges: bool = False
    recomputes_unread: bool = False
    keeps_remainders: bool = False
    keeps_shards: bool = False
    keeps_quantised: bool = False
    quantised_parameters: bool = False
    waits_for_passes: bool = False
    waits_for_collectives: bool = False
    composed: tuple[str, ...] = ()
    shares_weights: bool = False
    steps_together: bool = False
    widens_gradients: bool = False
    scales_apart: bool = False
    loops_experts: bool = False
    waits_in_attention: bool = False
    checkpoint_launches: int = 0
    composes_ring: bool = False

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a framework does where neither a scenario nor a published row says otherwise.

    Parameters
    ----------
    zero
        ZeRO stage.
    sequence_parallel
        Whether tensor ranks split the tokens between their products.
    overlaps_gradients
        Whether gradients are summed beside backward where states are not sharded in it.
    overlaps_tensor_on
        Words for devices on which collectives of tensor ranks run beside products.
    attention
        Fused attention kernel, one of `meshwise.simulator.models.attention.ATTENTION_KERNELS`.
    launch
        Seconds in which a host launches the kernels of one operator; 0 where steps are replayed.
    gradient_precision
        One of `meshwise.strategies.plan.problem.GRADIENT_PRECISIONS`; None for fp32 with bf16 and fp8, else the same.
    composed
        Kinds of operators that run as several kernels of torch.
    gathers_logits
        Whether every tensor rank gathers the logits and computes the whole loss.
    dropout
        Whether models whose feed-forward has no gate have dropout.
    selective
        What selective recomputation keeps: all but the ``core`` of attention, or attention and every second of the
        ``products`` of a layer.
    microbatches
        How many microbatches a pipeline has: ``stages``, as many as ranks; ``one`` of each microbatch's size.
    microbatch_of
        What a stated microbatch belongs to: a data ``rank``, or each ``chip``.
    """

    zero: int = 0
    sequence_parallel: bool = False
    overlaps_gradients: bool = True
    overlaps_tensor_on: tuple[str, ...] = ()
    attention: str = "flash_2"
    launch: float = 0.0
    gradient_precision: str | None = None
    composed: tuple[str, ...] = ()
    gathers_logits: bool = False
    dropout: bool = False
    selective: str = "core"
    microbatches: str = "one"
    microbatch_of: str = "rank"


@dataclass(frozen=True, slots=True)
class Entry:
    """A framework of the table.

    Parameters
    ----------
    family
        megatron, torch, xla, mindspore, or autograd: of the last family no peaks of memory were checked.
    read
        What was read, with versions and commits.
    aliases
        Names under which the framework is known, in lower case.
    sources
        Where each convention and default was read, by field; fields that the table leaves out have none.
    lineage
        Names of the entry that it is like, of the one that that is like, and so on.
    """

    name: str
    family: str
    description: str
    read: str
    aliases: tuple[str, ...]
    conventions: Framework
    defaults: Defaults
    sources: Mapping[str, str]
    lineage: tuple[str, ...] = ()

    __repr__ = brief_repr()


def _load_entries() -> dict[str, Entry]:
    table: dict[str, Any] = json.loads(files(__package__).joinpath(TABLE).read_text("utf-8"))
    return {name: _build_entry(table, name) for name in table}


def _build_entry(table: Mapping[str, Any], name: str) -> Entry:
    lineage, ancestors = [table[name]], []
    while base_name := lineage[-1].get("like"):
        ancestors.append(base_name)
        lineage.append(table[base_name])
    parts: dict[str, dict[str, Any]] = {}
    for part in ("conventions", "defaults"):
        # an entry's own fields replace those of the entry that it is like
        parts[part] = {key: field for entry in reversed(lineage) for key, field in entry.get(part, {}).items()}
    values = {part: {key: _freeze(field[0]) for key, field in fields.items()} for part, fields in parts.items()}
    return Entry(
        name,
        next(entry["family"] for entry in lineage if "family" in entry),
        table[name]["description"],
        table[name]["read"],
        tuple(table[name]["aliases"]),
        Framework(name=name, **values["conventions"]),
        Defaults(**values["defaults"]),
        {key: field[1] for fields in parts.values() for key, field in fields.items()},
        tuple(ancestors),
    )


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


ENTRIES = _load_entries()
"""Entries of the table by name."""

FRAMEWORKS = {name: entry.conventions for name, entry in ENTRIES.items()}
"""Conventions of frameworks by name."""

MEGATRON, TORCH, UNKNOWN = FRAMEWORKS["megatron"], FRAMEWORKS["torch"], FRAMEWORKS["unknown"]


def describe_frameworks() -> str:
    """Return the names of all frameworks, each with its description."""
    return "; ".join(f"{name}: {entry.description}" for name, entry in ENTRIES.items())


def split_words(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case; hyphens and signs part them, points and underscores do not.

    >>> split_words("Megatron-LM (April 2021), v2.5")
    ('megatron', 'lm', 'april', '2021', 'v2.5')
    """
    return tuple(word.strip("._") for word in re.findall(r"[a-z0-9._+]+", text.lower()) if word.strip("._"))


@cache
def list_aliases() -> Mapping[tuple[str, ...], str]:
    """Return the words of every alias, the names of entries among them, with the name of the entry."""
    names = {split_words(name): name for name in ENTRIES}
    return names | {split_words(alias): entry.name for entry in ENTRIES.values() for alias in entry.aliases}


@lru_cache(maxsize=1024)
def find_framework(text: str) -> Entry | None:
    """Return the entry of the longest alias in a text; None where there is none.

    An alias is in a text if all its words are: whole, in order and next to each other. Where a text names a framework
    and what it is built on, the framework counts.

    >>> find_framework("Megatron-LM (April 2021)").name, find_framework("Megatron-LM").name
    ('megatron_2021', 'megatron')
    >>> find_framework("NeMo / Megatron Core").name
    'nemo'
    """
    names = {alias: name for alias, name in list_aliases().items() if has_words(text, alias)}
    bases = {base for name in names.values() for base in ENTRIES[name].lineage}
    matches = [(sum(map(len, alias)), alias) for alias, name in names.items() if name not in bases]
    return ENTRIES[names[max(matches)[1]]] if matches else None


def has_words(text: str, phrase: tuple[str, ...]) -> bool:
    """Return whether a text has the words of a phrase: whole, in order and next to each other.

    >>> has_words("PyTorch FSDP2, compiled", ("fsdp2",)), has_words("PyTorch FSDP2, compiled", ("fsdp",))
    (True, False)
    """
    return f" {' '.join(phrase)} " in f" {' '.join(split_words(text))} "


@lru_cache(maxsize=1024)
def find_nearest_alias(text: str) -> str:
    """Return the alias that is spelled most like a text.

    >>> find_nearest_alias("Megatron_LM")
    'megatron lm'
    """
    aliases = [" ".join(alias) for alias in list_aliases()]
    return get_close_matches(" ".join(split_words(text)), aliases, n=1, cutoff=0.0)[0]
