"""Defaults of a row's framework, for what the row does not state."""

import re

from meshwise.scenarios.published.row import Row
from meshwise.simulator.machine.accelerator import GATED_ACTIVATION, RMS_NORM, ROTARY

_MEGATRON = re.compile(r"megatron|megascale|nemo|mcore|mindspeed|modellink|\bms-swift\b|\bprimus\b(?!.*titan)")
_BEFORE_2022 = re.compile(r"megatron-lm\W*(v?[12]\.[0-5]\b|[^,;+]*\b20(19|20|21)\b)")
_SHARDS_PARAMETERS = re.compile(
    r"fsdp|torchtitan|torchtune|gemini|zero[- ]?3|zero stage 3|fully sharded|zero\+\+|\bhpz\b|\bmics\b|"
    r"maxtext|levanter|easylm|axlearn|llm-?foundry|composer"
)
_SHARDS_OPTIMIZER = re.compile(r"nemo|bridge|mcore|distributed optimizer|mindspeed|zero[- ]?1")
_FUSES_LOSS = re.compile(r"llm-?foundry|composer|liger|fused[- ]?(linear )?cross|unsloth")
"""llm-foundry's models use the fused loss of flash-attn by default (llmfoundry/models/mpt, loss_fn)."""
_FUSES_MEGATRON_LOSS = re.compile(r"cross-entropy fusion|\bcef\b|fusion-impl te")
"""Words of Transformer Engine's loss; --cross-entropy-loss-fusion alone is another, which is not fused in memory."""
_XLA = re.compile(
    r"maxtext|\bjax|\bxla\b|levanter|easylm|t5x|\bpax(ml)?\b|praxis|axlearn|\bflax\b|maxdiffusion|\balpa\b"
)
_TORCH = re.compile(r"torch|fsdp|\bddp\b|fully_shard")
"""Words of torch's own parallel APIs, and of frameworks built on them."""
_DDP = re.compile(r"\bddp\b|distributeddataparallel")
_PARALLEL_SEQUENCES = re.compile(
    r"nemo|bridge|mcore|titan|transformer engine|\bte\b|mindspeed|nanotron|maxtext|megascale|primus"
)
_COMPILED = re.compile(r"maxtext|\bjax\b|mindspore|mindformers|\bxla\b|cuda graph|torch\.compile|torch_compile")

EAGER_LAUNCH = 45e-6
"""Seconds in which a host launches the kernels of one operator: Llama 1B forward takes 8.1 ms eager on a B200 that
replays it in 1.9 (stas00/ml-engineering, training/performance): 0.5 ms for the 11 operators of a layer."""
DEEPSPEED_LAUNCH = 100e-6
"""The same for Megatron-DeepSpeed, fitted to 8 of vTrain's 131 single-node runs, which the host bounds: the smallest
multiple of 10 us whose largest error (18 %, as with 110 us) is within a point of the best. The 8 runs have a microbatch
of 1: for every width and tensor degree one, drawn at random (``random.Random(0).choice`` of its sorted row ids)."""

_KERNELS = (
    (r"triton|llm-?foundry|mosaic", "flash_triton"),
    (r"fa3|flash[-_ ]?(attn|attention)?[-_ ]?v?3|cudnn|transformer ?engine|\bte\b|splash", "flash"),
    (r"fa2|flash[-_ ]?(attn|attention)?[-_ ]?v?2|sdpa", "flash_2"),
    (r"fa1|flash[-_ ]?(attn|attention)?[-_ ]?v?1|xformers|efficient", "flash_1"),
    (r"megatron|nemo|bridge|mcore|maxtext|jax|mind", "flash"),
)
"""Words for the fused attention kernels of the simulator. The first match wins, in the row's attention kernel and then
in its framework. MPT's ALiBi bias ran only in Triton (llm-foundry, 2023)."""


def is_megatron(row: Row) -> bool:
    """Return whether a row's framework is Megatron-LM or built on it."""
    words = row.text("framework")
    return bool(_MEGATRON.search(words)) and "torch fsdp" not in words


def is_torchtitan(row: Row) -> bool:
    """Return whether a row's framework is torchtitan."""
    return "torchtitan" in row.text("framework")


def is_compiled(row: Row) -> bool:
    """Return whether a compiler fuses the operators of a row's layers, or a graph replays its steps."""
    is_stated_compiled = row.flag("compiled")
    words = row.text("framework", "plan_note", "software")
    return bool(_COMPILED.search(words)) if is_stated_compiled is None else is_stated_compiled


def is_xla(row: Row) -> bool:
    """Return whether XLA compiles the training step of a row."""
    return bool(_XLA.search(row.text("framework")))


def memory_conventions(row: Row) -> str:
    """Return the memory conventions of a row's framework: a name in `meshwise.strategies.plan.framework.FRAMEWORKS`."""
    if is_megatron(row):
        if _BEFORE_2022.search(row.text("framework")):
            reading = "gradients added by kernels of their own, and none summed beside products"
            row.assume(f"{reading} (Megatron-LM before 2022)")
            return "megatron_2021"
        if "deepspeed" in row.text("framework"):
            return "megatron_deepspeed"
        if re.search("nemo|bridge", row.text("framework")):
            return "nemo"
        words = row.text("plan_note", "loss", "software")
        if _FUSES_MEGATRON_LOSS.search(words):
            return "megatron"
        row.assume("logits also in fp32, as the loss of Megatron-LM makes them unless told to fuse (not stated)")
        return "megatron_plain" if "no-gradient-accumulation-fusion" in words else "megatron_plain_loss"
    if is_xla(row):
        row.assume("memory kept as XLA keeps it")
        return "xla"
    if re.search("mindspore|mindformers", row.text("framework")):
        row.assume("memory kept as torch keeps it, and all of a layer computed again (MindSpore)")
        return "mindspore"
    words = row.text("framework", "plan_note")
    if _FUSES_LOSS.search(words):
        row.assume("memory kept as torch keeps it, with the loss fused, so that logits have no copies")
        return "torch_fused_loss"
    if not _TORCH.search(words):
        row.assume(f"conventions of {row.text('framework')[:40] or 'the framework'} not known: those of autograd alone")
        return "unknown"
    row.assume(f"memory kept as torch keeps it ({row.text('framework')[:40]})")
    return "torch"


_EAGER = ("torch", "torchtitan", "unknown")
"""Conventions of frameworks that run torch's operators one by one unless a compiler fuses them."""


def list_composed(row: Row, framework: str) -> tuple[str, ...]:
    """Return the kinds of operators that a row's framework, of these conventions, composes of several kernels."""
    norm = row.choose_word("norm_kernel", ("fused", "eager"))
    stated_kinds = (RMS_NORM,) if norm == "eager" else ()
    if framework not in _EAGER or is_compiled(row):
        return stated_kinds
    assumed_kinds = (ROTARY, GATED_ACTIVATION) if norm else (RMS_NORM, ROTARY, GATED_ACTIVATION)
    row.assume(f"{', '.join(assumed_kinds)} composed of torch's operators, where there are any (eager; not stated)")
    return (*stated_kinds, *assumed_kinds)


def zero_stage(row: Row) -> int:
    """Return the ZeRO stage of a row; where it states none, assume its framework's."""
    stated_stage = re.match(r"(?:zero|stage)?[-_ ]*(?:stage)?[-_ ]*([0-3])(?:\.0)?\b", row.text("zero_stage"))
    if stated_stage:
        return int(stated_stage[1])
    words = row.text("zero_stage", "framework", "schedule", "plan_note", "optimizer", "dp_overlap", "software")
    match = re.search(r"zero[-_ ]?(?:stage[-_ ]?)?([0-3])\b", words)
    if match:
        stage = int(match[1])
    elif re.match(r"os ?\+ ?g(?! ?\+ ?p)", row.text("zero_stage")):
        stage = 2
    elif _DDP.search(words):
        stage = 0
    elif _SHARDS_PARAMETERS.search(words) or (row.optional_count("fsdp_shards") or 1) > 1:
        stage = 3
    else:
        stage = 1 if _SHARDS_OPTIMIZER.search(words) or "param-gather" in words else 0
    row.assume(f"zero_stage {stage} (not stated; from {row.text('framework')[:40] or 'no framework named'})")
    return stage


def overlaps_gradients(row: Row, zero: int) -> bool:
    """Return whether the gradient reduction overlaps the backward pass."""
    flag = row.flag("dp_overlap")
    if flag is not None:
        return flag
    words = row.text("framework")
    is_early = re.search(r"2019|2020|2021|megatron-lm \(april", words) or row.text("framework") == "megatron-lm"
    overlaps = zero >= 2 or not (is_early or "megatron-deepspeed" in words)
    row.assume(f"gradients {'overlap' if overlaps else 'are reduced after'} backward (dp_overlap not stated)")
    return overlaps


def is_sequence_parallel(row: Row) -> bool:
    """Return whether a row uses sequence parallelism: tensor ranks split the tokens between their matrix products."""
    is_parallel = row.flag("sequence_parallel")
    if is_parallel is None:
        words = row.text("framework")
        is_parallel = bool(_PARALLEL_SEQUENCES.search(words))
        source = words[:40] or "no framework named"
        row.assume(f"sequence_parallel {str(is_parallel).lower()} (not stated; from {source})")
    return is_parallel


def overlaps_tensor(row: Row) -> bool:
    """Return whether the all-gathers and reduce-scatters of tensor ranks overlap matrix products.

    XLA splits both into chunks on TPUs (Wang et al. 2023, "Overlap communication with dependent computation via
    decomposition in large deep learning models", ASPLOS, section 6). MaxText has such collectives, since it shards
    activations between layers over tensor ranks (``configs/base.yml``: ``activation_embed``).
    """
    flag = row.flag("tp_overlap")
    if flag is not None:
        return flag
    overlaps = is_xla(row) and bool(re.search(r"tpu|\bv[2-7][ep]?\b", row.text("accelerator")))
    if overlaps:
        row.assume("tensor communication runs beside products, as XLA cuts both on TPUs (tp_overlap not stated)")
    return overlaps


def attention_kernel(row: Row) -> str:
    """Return the fused attention kernel of a row; the default is FlashAttention-2, which torch has."""
    texts = (row.text("attention_kernel"), row.text("framework"))
    matches = ((kernel, words) for words in texts for pattern, kernel in _KERNELS if re.search(pattern, words))
    kernel_name, words = next(matches, ("flash_2", texts[-1]))
    if kernel_name != "flash":
        row.assume(f"attention by {kernel_name} (from {words[:40] or 'nothing that is stated'})")
    return kernel_name


def launch_time(row: Row) -> float:
    """Return the seconds that a host needs to launch the kernels of one operator; 0 where it replays whole steps."""
    if is_xla(row) or is_compiled(row):
        return 0.0
    words = row.text("framework", "plan_note", "software")
    seconds = DEEPSPEED_LAUNCH if "megatron-deepspeed" in words else EAGER_LAUNCH
    row.assume(f"hosts launch an operator in {seconds * 1e6:.0f} us (eager; not stated)")
    return seconds
