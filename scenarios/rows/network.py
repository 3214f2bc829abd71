"""The network of a row: its stated sizes, those of the model it names, and the rules of its family."""

import re
from dataclasses import replace
from math import ceil, lcm

from scenarios.model_schema import MAX_EXPERTS, MAX_HEADS
from scenarios.rows.frameworks import is_megatron
from scenarios.rows.known_models import known_model
from scenarios.rows.row import Row, Skip
from simulator.models.bert import Bert
from simulator.models.experts import Experts
from simulator.models.hugging_face import MAX_LAYERS, MAX_WIDTH
from simulator.models.latent_attention import LatentAttention
from simulator.models.model import Model
from simulator.models.t5 import T5
from simulator.models.transformer import Transformer
from simulator.models.vit import VisionTransformer

MEGATRON_VOCAB_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times the tensor degree (--make-vocab-size-divisible-by)."""

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
_LATENT = re.compile(r"\bmla\b|latent attention|deepseek[-_ ]?v?[23]|deepseek[-_ ]?r1|kimi|moonlight")
_LATENT_SIZES = LatentAttention(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, q_rank=1536)
_VOCABULARIES = (
    (r"llama-?_? ?3|llama-?4", 128256), (r"llama|mi[sx]tral", 32000), (r"qwen", 151936), (r"gemma|nemotron", 256000),
    (r"deepseek", 102400), (r"opt\b|opt-", 50272), (r"mpt", 50368), (r"bloom", 250880),
)  # fmt: skip
_GPT_VOCABULARY = 51200
"""Of GPT-2's tokens, padded as in Narayanan et al. 2021, section 5."""


def network(row: Row) -> Model:
    """Return the model of a row; raises `Skip` where neither its sizes nor its name say what it is."""
    words = row.text("arch", "model")
    known = known_model(row.text("model"))
    family = next((name for name, pattern in _FAMILIES if pattern.search(words)), "decoder")
    if family in ("t5", "bert", "vit"):
        return _encoder(row, family, known)
    if family != "decoder":
        if known is None:
            raise Skip(f"arch is of a {family} model whose sizes a row cannot state, and model names none that is known")
        row.assume(f"the sizes of {known.name}, which the row names")
        return known
    if known is None and _UNKNOWN.search(words) and not row.states("n_heads"):
        raise Skip(f"arch {row.text('arch') or row.text('model')!r:.60} is not expressed by the simulator")
    return _decoder(row, words, known if isinstance(known, Transformer) else None)


def _decoder(row: Row, words: str, known: Transformer | None) -> Transformer:
    base = known or _of_family(row, words)
    layers, hidden = _outer_sizes(row, known)
    heads = _size(row, "n_heads", known and known.heads, MAX_HEADS) or _heads(row, hidden)
    kv_heads = _kv_heads(row, heads, known)
    kind = _ffn_kind(row, base)
    experts = _experts(row, known, hidden, layers)
    latent = _latent(row, words, known, experts)
    flash = _is_flash(row, words)
    head = _head_dim(row, hidden, heads, known) if latent is None else None
    return replace(
        base,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else kv_heads,
        ffn=_size(row, "ffn_hidden", known and known.ffn, MAX_WIDTH) or _ffn(row, hidden, kind, experts),
        vocab=_vocabulary(row, words, known),
        ffn_kind=kind,
        tied_embeddings=_tied(row, base, known),
        attention="flash" if flash else "unfused",
        dropout=not flash,
        positions="rotary" if latent else base.positions,
        kv_channels=head,
        qk_norm=base.qk_norm and latent is None,
        experts=experts,
        latent=latent,
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


def _size(row: Row, field: str, known: int | None, most: int) -> int | None:
    value = row.count(field, most)
    if value is None and known is not None:
        row.assume(f"{field} {known} (not stated; of the model named)")
        return known
    return value


def _outer_sizes(row: Row, known: Transformer | None) -> tuple[int, int]:
    layers = _size(row, "n_layers", known and known.layers, MAX_LAYERS)
    hidden = _size(row, "hidden", known and known.hidden, 1_000_000)
    if layers is None and hidden is None:
        return _guessed_sizes(row)
    if layers is None or hidden is None:
        stated = row.number("n_params") or _named_params(row)
        if stated is None:
            raise Skip(f"{'n_layers' if layers is None else 'hidden'} is not stated, and model names none that is known")
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
    width = row.count("head_dim", MAX_WIDTH) or (128 if hidden % 128 == 0 else 64)
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
    stated = row.count("head_dim", MAX_WIDTH)
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


def _ffn(row: Row, hidden: int, kind: str, experts: Experts | None) -> int:
    if experts is not None:
        return experts.ffn
    # Touvron et al. 2023, "LLaMA", section 2.2: 2/3 of 4 hidden, in multiples of 256 as released
    ffn = 4 * hidden if kind == "gelu" else 256 * ceil(8 * hidden / 3 / 256)
    row.assume(f"ffn_hidden {ffn} (not stated; the rule of {kind})")
    return ffn


def _vocabulary(row: Row, words: str, known: Transformer | None) -> int:
    vocab = _size(row, "vocab", known and known.vocab, MAX_WIDTH)
    if vocab is None:
        vocab = next((size for pattern, size in _VOCABULARIES if re.search(pattern, words)), _GPT_VOCABULARY)
        row.assume(f"vocab {vocab} (not stated; of the family)")
    tensor = row.count("tp") or 1
    multiple = MEGATRON_VOCAB_MULTIPLE * tensor
    if vocab % tensor or (is_megatron(row) and vocab % multiple):
        vocab = -(-vocab // multiple) * multiple
        row.assume(f"vocabulary padded to {vocab}, a multiple of {multiple}, as Megatron-LM does")
    return vocab


def _tied(row: Row, base: Transformer, known: Transformer | None) -> bool:
    tied = row.flag("tied_embeddings")
    if tied is None:
        tied = base.tied_embeddings
        row.assume(f"tied_embeddings {str(tied).lower()} (not stated{'; of the model named' if known else ''})")
    return tied


def _experts(row: Row, known: Transformer | None, hidden: int, layers: int) -> Experts | None:
    count = row.count("moe_experts", MAX_EXPERTS)
    base = known.experts if known else None
    if count in (None, 1) and base is None:
        return None
    base = base if base is not None and count in (None, base.count) else None
    if count is None and base is not None:
        row.assume(f"{base.count} experts, {base.top_k} a token (not stated; of the model named)")
    top_k = row.count("moe_topk", MAX_EXPERTS) or (base.top_k if base else 2)
    if not row.states("moe_topk"):
        row.assume(f"moe_topk {top_k} (not stated)")
    ffn = row.count("moe_ffn_hidden", MAX_WIDTH) or (base.ffn if base else None) or row.count("ffn_hidden", MAX_WIDTH)
    if not row.states("moe_ffn_hidden"):
        ffn = ffn or 4 * hidden
        row.assume(f"moe_ffn_hidden {ffn} (not stated)")
    count = count or (base.count if base else 1)
    row.assume("tokens are spread evenly over experts (not stated)")
    dense = min(row.count("n_dense_layers", MAX_LAYERS) or (base.dense_layers if base else 0), layers - 1)
    bias = base.score_bias if base else False
    return Experts(count, min(top_k, count), ffn or hidden, _shared(row, base, ffn or hidden), dense, bias)


def _shared(row: Row, base: Experts | None, ffn: int) -> int:
    width = row.count("moe_shared_ffn_hidden", MAX_WIDTH)
    if width is None:
        shared = base.shared if base and "moe_shared_ffn_hidden" not in row.fields else 0
        if shared:
            row.assume(f"{shared} shared experts (not stated; of the model named)")
        return shared
    if width % ffn:
        row.assume(f"moe_shared_ffn_hidden {width} taken as {ceil(width / ffn)} experts of {ffn}")
    return ceil(width / ffn)


def _latent(row: Row, words: str, known: Transformer | None, experts: Experts | None) -> LatentAttention | None:
    named = known.latent if known else None
    if named is None and (experts is None or not _LATENT.search(words)):
        return None
    sizes = named or _LATENT_SIZES
    ranks = f"ranks {sizes.kv_rank} and {sizes.q_rank or 'none for queries'}"
    row.assume(f"latent attention with {ranks} (a row states none; of {'the model named' if named else 'DeepSeek'})")
    return sizes


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


def _encoder(row: Row, family: str, known: Model | None) -> Model:
    """Return a BERT, T5 or ViT."""
    stated = row.states("n_layers") and row.states("hidden")
    if not stated and not isinstance(known, Bert | T5 | VisionTransformer):
        raise Skip(f"n_layers and hidden of a {family} are not stated, and model names none that is known")
    if known is not None:
        row.assume(f"what the row does not state as in {known.name}, which it names")
    base = known if isinstance(known, Bert | T5 | VisionTransformer) else None
    layers, hidden = (row.count("n_layers", MAX_LAYERS), row.count("hidden", MAX_WIDTH))
    layers, hidden = layers or (base.layers if base else 1), hidden or (base.hidden if base else 1)
    heads = row.count("n_heads", MAX_HEADS) or (base.heads if base else _heads(row, hidden))
    ffn = row.count("ffn_hidden", MAX_WIDTH) or (base.ffn if base else 4 * hidden)
    if family == "vit":
        return _vision(row, base, layers, hidden, heads, ffn)
    default = base.vocab if isinstance(base, Bert | T5) else {"bert": 30522, "t5": 32128}[family]
    vocab = row.assumed_count("vocab", default, most=MAX_WIDTH)
    tensor = row.count("tp") or 1
    if vocab % tensor:
        vocab = -(-vocab // (MEGATRON_VOCAB_MULTIPLE * tensor)) * MEGATRON_VOCAB_MULTIPLE * tensor
        row.assume(f"vocabulary padded to {vocab}, as Megatron-LM does")
    if family == "bert":
        positions = max(512, row.needed("seq_len", 10**8))
        return Bert(layers, hidden, heads, ffn, vocab, max_positions=positions)
    row.assume(f"{layers} layers in the encoder and as many in the decoder, over seq_len tokens each")
    width = row.count("head_dim", MAX_WIDTH) or (base.head_dim if isinstance(base, T5) else max(1, hidden // heads))
    return T5(layers, hidden, heads, width, ffn, vocab)


def _vision(row: Row, base: Model | None, layers: int, hidden: int, heads: int, ffn: int) -> VisionTransformer:
    named = re.search(r"/(\d\d?)\b", row.text("model"))
    patch = int(named[1]) if named else base.patch if isinstance(base, VisionTransformer) else 16
    tokens = row.count("seq_len") or 0
    side = round(tokens**0.5)
    image = patch * side if side > 1 and abs(side * side - tokens) <= 1 else 224
    row.assume(f"images of {image} pixels in patches of {patch}")
    return VisionTransformer(layers, hidden, heads, ffn, patch=max(patch, 1), image=image - image % patch or patch)
