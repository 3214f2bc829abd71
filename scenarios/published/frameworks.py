"""The framework of a row, found by its aliases, and its defaults for what the row does not state.

What a row states wins: fields for single conventions (``norm_kernel``, ``loss``, ``compiled``, ``gradient_precision``),
and words for ZeRO stages and attention kernels in its other fields.
"""

import re

from meshwise.scenarios.intervals import NOT_KNOWN
from meshwise.scenarios.published.row import Row
from meshwise.simulator.machine.accelerator import GATED_ACTIVATION, RMS_NORM, ROTARY
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.strategies.plan.framework import (
    ENTRIES,
    Entry,
    find_framework,
    find_nearest_alias,
    has_words,
    split_words,
)

_UNKNOWN_ON = {"tpu": "xla"}
"""What a framework that is not known is taken for, by a word of its accelerator; elsewhere for `UNKNOWN`, on torch."""

STAGE_WORDS = {
    "zero 0": 0, "ddp": 0, "distributeddataparallel": 0,
    "zero 1": 1, "zero1": 1, "distributed optimizer": 1, "param gather": 1,
    "zero 2": 2, "zero2": 2,
    "zero 3": 3, "zero3": 3, "fsdp": 3, "fsdp2": 3, "fully_shard": 3, "fully sharded": 3, "gemini": 3, "zero++": 3,
    "hpz": 3, "mics": 3,
}  # fmt: skip
"""ZeRO stages by words that state them, whole and next to each other; the first of the table that a row has counts."""

_KERNELS = (
    (r"triton|llm-?foundry|mosaic", "flash_triton"),
    (r"fa3|flash[-_ ]?(attn|attention)?[-_ ]?v?3|cudnn|transformer ?engine|\bte\b|splash", "flash"),
    (r"fa2|flash[-_ ]?(attn|attention)?[-_ ]?v?2|sdpa", "flash_2"),
    (r"fa1|flash[-_ ]?(attn|attention)?[-_ ]?v?1|xformers|efficient", "flash_1"),
)
"""Words for the fused attention kernels of the simulator. The first match wins."""

_COMPILED = ("torch.compile", "torch_compile", "cuda graph", "cuda graphs")
"""Words for steps that are compiled or replayed."""


def find_entry(row: Row) -> Entry:
    """Return the entry of a row's framework; where it is not known, note that and return that of unknown ones."""
    words = row.text("framework")
    entry = find_framework(words)
    if entry is not None:
        return entry
    device_words = split_words(row.text("accelerator"))
    name = next((name for word, name in _UNKNOWN_ON.items() if word in device_words), "unknown")
    nearest = f"framework {words[:40]!r} {NOT_KNOWN}, nearest alias {find_nearest_alias(words)!r}" if words else ""
    # `PRICED_AS_UNKNOWN` of meshwise.scenarios.intervals widens the interval by these words
    row.assume(f"{nearest or 'framework not stated'}: priced as {name}, {ENTRIES[name].description}")
    return ENTRIES[name]


def is_megatron(row: Row) -> bool:
    """Return whether a row's framework is Megatron-LM or built on it."""
    return find_entry(row).family == "megatron"


def is_torchtitan(row: Row) -> bool:
    """Return whether a row's framework is torchtitan."""
    return find_entry(row).name == "torchtitan"


def is_compiled(row: Row) -> bool:
    """Return whether a compiler fuses the operators of a row's layers, or a graph replays its steps."""
    is_stated_compiled = row.flag("compiled")
    if is_stated_compiled is not None:
        return is_stated_compiled
    words = row.text("framework", "plan_note", "software")
    return not find_entry(row).defaults.launch or any(has_words(words, split_words(phrase)) for phrase in _COMPILED)


def memory_conventions(row: Row) -> str:
    """Return the conventions of a row's framework: a name in `meshwise.strategies.plan.framework.FRAMEWORKS`."""
    entry = find_entry(row)
    name = _find_megatron_loss(row) if entry.name in ("megatron", "megatron_core") else entry.name
    if entry.family == "torch" and row.choose_word("loss", ("sharded", "gathered", "compiled")) == "compiled":
        name = "torch_compiled_loss"
    if row.text("framework") != name:
        row.assume(f"priced by the conventions of {name} (framework {row.text('framework')[:40]!r})")
    return name


_FUSED_LOSS = ("cross entropy fusion", "cef", "fusion impl te")
"""Words of Transformer Engine's loss."""
_COMPILED_LOSS = split_words("cross-entropy-loss-fusion")
"""Words of Megatron-LM's own loss, compiled."""
_UNFUSED_GRADIENTS = split_words("no-gradient-accumulation-fusion")


def _find_megatron_loss(row: Row) -> str:
    """Return the conventions of Megatron-LM with the loss that a row tells; its own is the default."""
    words = row.text("plan_note", "loss", "software").replace("_", " ")
    if any(has_words(words, split_words(phrase)) for phrase in _FUSED_LOSS):
        return "megatron"
    is_compiled_loss = has_words(words, _COMPILED_LOSS)
    if not is_compiled_loss:
        row.assume("logits also in fp32, as the loss of Megatron-LM makes them unless told to fuse (not stated)")
    if has_words(words, _UNFUSED_GRADIENTS):
        return "megatron_plain_compiled_loss" if is_compiled_loss else "megatron_plain"
    return "megatron_compiled_loss" if is_compiled_loss else "megatron_plain_loss"


_TORCH_WORDS = frozenset({"torch", "eager", "math", "naive", "baddbmm"})
"""Words for attention whose softmax is composed of torch's operators."""


def list_composed(row: Row) -> tuple[str, ...]:
    """Return the kinds of operators that a row composes of several kernels: those it states, else its framework's."""
    norm, kernel_words = row.choose_word("norm_kernel", ("fused", "eager")), split_words(row.text("attention_kernel"))
    stated = {RMS_NORM: norm == "eager"} if norm else {}
    if not _TORCH_WORDS.isdisjoint(kernel_words):
        stated[OperatorKind.SOFTMAX] = True
    elif "fused" in kernel_words or is_compiled(row):
        stated[OperatorKind.SOFTMAX] = False
    assumed_kinds = () if is_compiled(row) else find_entry(row).defaults.composed
    open_kinds = [kind for kind in assumed_kinds if kind not in stated]
    if open_kinds:
        row.assume(f"{', '.join(open_kinds)} composed of torch's operators, where there are any (eager; not stated)")
    return tuple(
        kind
        for kind in (RMS_NORM, ROTARY, GATED_ACTIVATION, OperatorKind.SOFTMAX)
        if stated.get(kind, kind in open_kinds)
    )


def gathers_logits(row: Row) -> bool:
    """Return whether every tensor rank of a row gathers the logits and computes the whole loss."""
    stated_loss = row.choose_word("loss", ("sharded", "gathered", "compiled"))
    return stated_loss == "gathered" if stated_loss else find_entry(row).defaults.gathers_logits


def selects_products(row: Row) -> bool:
    """Return whether selective recomputation, of which a row says no more, keeps attention and half of the products."""
    is_bare = row.text("recompute") == "selective" and not row.states("recompute_detail")
    return is_bare and find_entry(row).defaults.selective == "products"


def zero_stage(row: Row) -> int:
    """Return the ZeRO stage of a row; where it states none, assume its framework's."""
    stated_stage = re.match(r"(?:zero|stage)?[-_ ]*(?:stage)?[-_ ]*([0-3])(?:\.0)?\b", row.text("zero_stage"))
    if stated_stage:
        return int(stated_stage[1])
    words = row.text("zero_stage", "framework", "schedule", "plan_note", "optimizer", "dp_overlap", "software")
    match = re.search(r"zero[-_ ]?(?:stage[-_ ]?)?([0-3])\b", words)
    word_stages = (stage for phrase, stage in STAGE_WORDS.items() if has_words(words, split_words(phrase)))
    word_stage = next(word_stages, None)
    if match:
        stage = int(match[1])
    elif re.match(r"os ?\+ ?g(?! ?\+ ?p)", row.text("zero_stage")):
        stage = 2
    elif word_stage is not None:
        stage = word_stage
    elif (row.optional_count("fsdp_shards") or 1) > 1:
        stage = 3
    else:
        stage = find_entry(row).defaults.zero
    row.assume(f"zero_stage {stage} (not stated; from {row.text('framework')[:40] or 'no framework named'})")
    return stage


def overlaps_gradients(row: Row, zero: int) -> bool:
    """Return whether the gradient reduction overlaps the backward pass."""
    flag = row.flag("dp_overlap")
    if flag is not None:
        return flag
    overlaps = zero >= 2 or find_entry(row).defaults.overlaps_gradients
    row.assume(f"gradients {'overlap' if overlaps else 'are reduced after'} backward (dp_overlap not stated)")
    return overlaps


def is_sequence_parallel(row: Row) -> bool:
    """Return whether a row uses sequence parallelism: tensor ranks split the tokens between their matrix products."""
    is_parallel = row.flag("sequence_parallel")
    if is_parallel is None:
        is_parallel = find_entry(row).defaults.sequence_parallel
        source = row.text("framework")[:40] or "no framework named"
        row.assume(f"sequence_parallel {str(is_parallel).lower()} (not stated; from {source})")
    return is_parallel


def overlaps_tensor(row: Row) -> bool:
    """Return whether the all-gathers and reduce-scatters of tensor ranks overlap matrix products."""
    flag = row.flag("tp_overlap")
    if flag is not None:
        return flag
    entry = find_entry(row)
    overlaps = any(device in row.text("accelerator") for device in entry.defaults.overlaps_tensor_on)
    if overlaps:
        row.assume(f"tensor communication runs beside products, as {entry.name} does there (tp_overlap not stated)")
    return overlaps


def attention_kernel(row: Row) -> str:
    """Return the fused attention kernel of a row: the one it states, else its framework's."""
    words = row.text("attention_kernel")
    kernel_name = next((kernel for pattern, kernel in _KERNELS if re.search(pattern, words)), None)
    source = words
    if kernel_name is None:
        kernel_name, source = find_entry(row).defaults.attention, row.text("framework")
    if kernel_name != "flash":
        row.assume(f"attention by {kernel_name} (from {source[:40] or 'nothing that is stated'})")
    return kernel_name


def launch_time(row: Row) -> float:
    """Return the seconds that a host needs to launch the kernels of one operator; 0 where it replays whole steps."""
    if is_compiled(row):
        return 0.0
    seconds = find_entry(row).defaults.launch
    row.assume(f"hosts launch an operator in {seconds * 1e6:.0f} us (eager; not stated)")
    return seconds
