"""The network of a row: its stated sizes, those of the model it names, and the rules of its family."""

import re
from dataclasses import replace
from math import ceil, lcm

from scenarios.model_schema import MAX_HEADS
from scenarios.rows.encoder import ENCODERS, encoder
from scenarios.rows.frameworks import attention_kernel
from scenarios.rows.known_models import known_model
from scenarios.rows.mixture import experts, latent
from scenarios.rows.row import Row, Skip
from scenarios.rows.vocabulary import of_family, padded
from simulator.models.experts import Experts
from simulator.models.hugging_face import MAX_LAYERS, MAX_WIDTH
from simulator.models.model import Model
from simulator.models.transformer import Transformer

_GATED = re.compile(
    r"llama|mi[sx]tral|qwen|gemma|\byi\b|internlm|baichuan|deepseek|glm|olmo|phi-?3|palm|telechat|swiglu|gated|silu|"
    r"mixtral|skywork|aquila|minicpm|kimi|moonlight|granite|smollm"
)
_FAMILIES = (
    ("t5", re.compile(r"\bm?t5|encoder-decoder|seq2seq|\bul2\b")),
    ("bert", re.compile(r"bert\b|bert[-_ ]|encoder|electra")),
    ("vit", re.compile(r"\bvit\b|\bvit[-_]|vision transformer|deit\b")),
    ("image", re.compile(r"resnet")),
    ("dlrm", re.compile(r"dlrm|recommend")),
    ("diffusion", re.compile(r"unet|u-net|stable[- ]diffusion")),
)
_UNKNOWN = re.compile(r"\bdit\b|diffusion|mamba|\bssm\b|state space|rwkv|whisper|speech|clip\b|multimodal|vlm|swin|cnn")


def network(row: Row) -> Model:
    """Return the model of a row; raises `Skip` where neither its sizes nor its name say what it is."""
    words = row.text("arch", "model")
    known = known_model(row.text("model"))
    family = next((name for name, pattern in _FAMILIES if pattern.search(words)), "decoder")
    if family in ENCODERS:
        return encoder(row, family, known)
    if family != "decoder":
        if known is None:
            raise Skip(f"arch is of a {family} model, whose sizes a row cannot state, and model names none known")
        row.assume(f"the sizes of {known.name}, which the row names")
        return known
    if known is None and _UNKNOWN.search(words) and not row.states("n_heads"):
        raise Skip(f"arch {row.text('arch') or row.text('model')!r:.60} is not expressed by the simulator")
    return _decoder(row, words, known if isinstance(known, Transformer) else None)


def _decoder(row: Row, words: str, known: Transformer | None) -> Transformer:
    base = known or _of_family(row, words)
    layers, hidden = _outer_sizes(row, known)
    heads = _size(row, "n_heads", known, MAX_HEADS) or _heads(row, hidden)
    kv_heads = _kv_heads(row, heads, known)
    kind = _ffn_kind(row, base)
    mixed = experts(row, known, hidden, layers)
    compressed = latent(row, words, known, mixed is not None)
    flash = _is_flash(row, words)
    head = _head_dim(row, hidden, heads, known) if compressed is None else None
    return replace(
        base,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if compressed else kv_heads,
        ffn=_size(row, "ffn_hidden", known, MAX_WIDTH) or _ffn(row, hidden, kind, mixed),
        vocab=padded(row, _size(row, "vocab", known, MAX_WIDTH) or of_family(row, words)),
        ffn_kind=kind,
        tied_embeddings=_tied(row, base, known),
        attention=attention_kernel(row) if flash else "unfused",
        dropout=not flash,
        positions="rotary" if compressed else base.positions,
        kv_channels=head,
        qk_norm=base.qk_norm and compressed is None,
        experts=mixed,
        latent=compressed,
        name=base.name if known else "transformer",
    )


def _of_family(row: Row, words: str) -> Transformer:
    """Return a decoder with the habits of a family and no sizes yet."""
    kind = row.text("ffn_type")
    gated = bool(re.search(r"glu|gated|silu", kind)) if kind else bool(_GATED.search(words))
    if not row.states("arch"):
        row.assume(f"a decoder transformer like {'Llama' if gated else 'GPT'} (arch not stated)")
    if gated:
        return Transformer(1, 1, 1, 1, 1, 1, "swiglu", tied_embeddings=False, positions="rotary")
    rotary = bool(re.search(r"rotary|rope|alibi|neox|nemotron|falcon", words))
    biases = "none" if re.search(r"no bias|nemotron|falcon|mpt", words) else None
    parallel = bool(re.search(r"neox|gpt-?j|falcon|pythia", words))
    positions = "rotary" if rotary and "learned" not in words else "learned"
    return Transformer(1, 1, 1, 1, 1, 1, positions=positions, biases=biases, parallel_residual=parallel)


_ATTRIBUTES = {"n_layers": "layers", "hidden": "hidden", "n_heads": "heads", "ffn_hidden": "ffn", "vocab": "vocab"}


def _size(row: Row, field: str, known: Transformer | None, most: int) -> int | None:
    """Return a size as stated, or of the model named."""
    value = row.count(field, most)
    if value is not None or known is None:
        return value
    named = int(getattr(known, _ATTRIBUTES[field]))
    row.assume(f"{field} {named} (not stated; of the model named)")
    return named


def _outer_sizes(row: Row, known: Transformer | None) -> tuple[int, int]:
    layers = _size(row, "n_layers", known, MAX_LAYERS)
    hidden = _size(row, "hidden", known, 1_000_000)
    if layers is None and hidden is None:
        return _guessed_sizes(row)
    if layers is None or hidden is None:
        stated = row.number("n_params") or _named_params(row)
        if stated is None:
            missing = "n_layers" if layers is None else "hidden"
            raise Skip(f"{missing} is not stated, and model names none that is known")
        hidden = hidden or max(128, 128 * round((stated / (12 * (layers or 1))) ** 0.5 / 128))
        layers = layers or max(1, min(round(stated / (12 * hidden**2)), MAX_LAYERS))
        row.assume(f"{layers} layers of hidden {hidden} from the number of parameters: 12 * layers * hidden^2")
    return layers, hidden


def _named_params(row: Row) -> float | None:
    """Return the parameters that a model's name ends in, as in ``GPT 20B``."""
    found = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*([mbt])\b", row.text("model"))
    return float(found[-1][0]) * {"m": 1e6, "b": 1e9, "t": 1e12}[found[-1][1]] if found else None


def _guessed_sizes(row: Row) -> tuple[int, int]:
    """Return layers and hidden size of a transformer of so many parameters, 128 wide for each layer.

    The shape of Brown et al. 2020, table 2.1: hidden / layers is 64 to 128.
    """
    params = row.number("n_params") or _named_params(row)
    if params is None or params > 1e14:
        raise Skip("n_layers and hidden are not stated, and model names none that is known")
    layers = max(2, round((params / (12 * 128**2)) ** (1 / 3)))
    hidden = max(128, 128 * round((params / (12 * layers)) ** 0.5 / 128))
    row.assume(f"{layers} layers of hidden {hidden}, guessed from {params / 1e9:.3g} billion parameters")
    return min(layers, MAX_LAYERS), hidden


def _heads(row: Row, hidden: int) -> int:
    width = row.optional("head_dim", MAX_WIDTH) or (128 if hidden % 128 == 0 else 64)
    heads = max(1, hidden // width)
    row.assume(f"n_heads {heads} (not stated; heads of {width})")
    return heads


def _kv_heads(row: Row, heads: int, known: Transformer | None) -> int:
    default = known.kv_heads if known and heads == known.heads else heads
    kv_heads = row.count("n_kv_heads", MAX_HEADS) or default
    if not row.states("n_kv_heads"):
        row.assume(f"n_kv_heads {kv_heads} (not stated)")
    tensor = row.count("tp") or 1
    if heads % kv_heads:
        row.assume(f"n_kv_heads {heads}: {kv_heads} do not divide {heads} heads")
        kv_heads = heads
    if kv_heads % tensor and heads % tensor == 0:
        more = lcm(kv_heads, tensor)
        kv_heads = more if heads % more == 0 else heads
        row.assume(f"keys and values repeated to {kv_heads} heads for tensor({tensor}) ranks")
    return kv_heads


def _head_dim(row: Row, hidden: int, heads: int, known: Transformer | None) -> int | None:
    stated = row.optional("head_dim", MAX_WIDTH)
    width = stated or (known.kv_channels if known and known.hidden == hidden else None)
    if width is None and hidden % heads:
        width = -(-hidden // heads)
        row.assume(f"head_dim {width} (not stated; {heads} heads do not divide hidden {hidden})")
    return width if width is not None and width * heads != hidden else None


def _ffn_kind(row: Row, base: Transformer) -> str:
    words = row.text("ffn_type")
    if not words:
        row.assume(f"ffn_type {base.ffn_kind} (not stated)")
        return base.ffn_kind
    if re.search("geglu|gelu.*gated|gated.*gelu", words):
        return "geglu"
    return "swiglu" if re.search("glu|gated|silu|swish", words) else "gelu"


def _ffn(row: Row, hidden: int, kind: str, mixed: Experts | None) -> int:
    if mixed is not None:
        return mixed.ffn
    # Touvron et al. 2023, "LLaMA", section 2.2: 2/3 of 4 hidden, in multiples of 256 as released
    ffn = 4 * hidden if kind == "gelu" else 256 * ceil(8 * hidden / 3 / 256)
    row.assume(f"ffn_hidden {ffn} (not stated; the rule of {kind})")
    return ffn


def _tied(row: Row, base: Transformer, known: Transformer | None) -> bool:
    tied = row.flag("tied_embeddings")
    if tied is None:
        tied = base.tied_embeddings
        row.assume(f"tied_embeddings {str(tied).lower()} (not stated{'; of the model named' if known else ''})")
    return tied


_FUSED = re.compile(r"flash|sdpa|cudnn|fused|efficient|xformers|splash|transformer ?engine|\bte\b|fa[23]|triton")
_UNFUSED = re.compile(r"unfused|eager|math|naive|core|local|softmax|standard|vanilla|baddbmm|dot[_ ]product")
_BEFORE_FLASH = re.compile(r"megatron|deepspeed|colossal|fairseq|alpa|gshard")


def _is_flash(row: Row, words: str) -> bool:
    kernel = row.text("attention_kernel")
    if _UNFUSED.search(kernel) and "dot-product flash" not in kernel and not re.search("flash|cudnn", kernel):
        return False
    if _FUSED.search(kernel):
        return True
    old = re.search(r"v100|p100|a100|t4\b|titan|2080|ascend 910 ", row.text("accelerator") + " ")
    gpt = not _GATED.search(words) and _BEFORE_FLASH.search(row.text("framework")) and not _GATED.search(kernel)
    flash = not (old and gpt)
    how = "flash attention, no dropout" if flash else "unfused attention and dropout, as Megatron-LM without flash had"
    row.assume(f"{how} (not stated)")
    return flash
