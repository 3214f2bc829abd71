"""The network of a row: from its stated sizes, then the sizes of the model that it names, then the rules of its family.

Networks with an encoder are BERT, T5 and ViT; decoders may have experts or latent attention. The table of released
models by their published names adds to `meshwise.simulator.models.presets`.
"""

import re
from dataclasses import replace
from math import ceil, lcm
from typing import Any

from meshwise.scenarios.intervals import NOT_UNDERSTOOD
from meshwise.scenarios.published.frameworks import attention_kernel, find_entry, is_megatron
from meshwise.scenarios.published.row import Row, Skip
from meshwise.scenarios.schema.model import MAX_EXPERTS, MAX_HEADS
from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.hugging_face import MAX_LAYERS, MAX_WIDTH
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.models.vision import VisionTransformer

MEGATRON_VOCAB_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times the tensor degree (--make-vocab-size-divisible-by)."""

_VOCABULARY_SIZES = (
    (r"llama-?_? ?3|llama-?4", 128256), (r"llama|mi[sx]tral", 32000), (r"qwen", 151936), (r"gemma|nemotron", 256000),
    (r"deepseek", 102400), (r"opt\b|opt-", 50272), (r"mpt", 50368), (r"bloom", 250880),
)  # fmt: skip
_GPT = 51200
"""GPT-2's vocabulary, padded as in Narayanan et al. 2021, section 5."""


def family_vocab(row: Row, words: str) -> int:
    """Return the vocabulary size of a model family, and note it as an assumption."""
    vocab = next((size for pattern, size in _VOCABULARY_SIZES if re.search(pattern, words)), _GPT)
    row.assume(f"vocab {vocab} (not stated; of the family)")
    return vocab


def pad_vocabulary(row: Row, vocab: int) -> int:
    """Return a vocabulary size that tensor ranks can split evenly; Megatron-LM always pads."""
    tensor = row.count("tp") or 1
    multiple = MEGATRON_VOCAB_MULTIPLE * tensor
    if vocab % tensor == 0 and not (is_megatron(row) and "deepspeed" not in row.text("framework") and vocab % multiple):
        return vocab
    padded_vocab = -(-vocab // multiple) * multiple
    row.assume(f"vocabulary padded to {padded_vocab}, a multiple of {multiple}, as Megatron-LM does")
    return padded_vocab


def pad_to_ranks(row: Row, name: str, size: int) -> int:
    """Return the least size, from a stated one on, that tensor ranks can share."""
    tensor = row.count("tp") or 1
    if size % tensor == 0:
        return size
    padded_size = -(-size // tensor) * tensor
    row.assume(f"{name} {padded_size}, for tp({tensor}) does not divide {size}")
    return padded_size


ENCODERS = ("bert", "t5", "vit")


def build_encoder(row: Row, family: str, words: str, known: Model | None) -> Model:
    """Return the BERT, T5 or ViT of a row; raise `Skip` where its sizes are not known."""
    base = known if isinstance(known, Bert | T5 | VisionTransformer) else None
    if base is None and not (row.states("n_layers") and row.states("hidden")):
        raise Skip(f"n_layers and hidden of a {family} are not stated, and model names none that is known")
    if known is not None:
        row.assume(f"what the row does not state as in {known.name}, which it names")
    layers = row.count("n_layers", MAX_LAYERS) or (base.layers if base else 1)
    hidden = row.count("hidden", MAX_WIDTH) or (base.hidden if base else 1)
    heads = row.optional_count("n_heads", MAX_HEADS) or (base.heads if base else max(1, hidden // 64))
    ffn = row.optional_count("ffn_hidden", MAX_WIDTH) or (base.ffn if base else 4 * hidden)
    heads, ffn = pad_to_ranks(row, "n_heads", heads), pad_to_ranks(row, "ffn_hidden", ffn)
    if family == "vit":
        return replace(_build_vision(row, base, layers, hidden, heads, ffn), attention=_choose_attention(row, words))
    default = base.vocab if isinstance(base, Bert | T5) else {"bert": 30522, "t5": 32128}[family]
    vocab = pad_vocabulary(row, row.count_or_default("vocab", default, maximum=MAX_WIDTH))
    if family == "bert":
        positions = max(512, row.optional_count("seq_len", 10**8) or 0)
        attention = _choose_attention(row, words)
        return Bert(layers, hidden, heads, ffn, vocab, max_positions=positions, attention=attention)
    row.assume(f"{layers} layers in the encoder and as many in the decoder, over seq_len tokens each")
    width = row.optional_count("head_dim", MAX_WIDTH) or (
        base.head_dim if isinstance(base, T5) else max(1, hidden // heads)
    )
    return T5(layers, hidden, heads, width, ffn, vocab)


def _build_vision(row: Row, base: Model | None, layers: int, hidden: int, heads: int, ffn: int) -> VisionTransformer:
    match = re.search(r"/(\d\d?)\b", row.text("model"))
    patch = int(match[1]) if match else base.patch if isinstance(base, VisionTransformer) else 16
    tokens = row.optional_count("seq_len") or 0
    side = round(tokens**0.5)
    image = patch * side if side > 1 and abs(side * side - tokens) <= 1 else 224
    row.assume(f"images of {image} pixels in patches of {patch}")
    return VisionTransformer(layers, hidden, heads, ffn, patch=max(patch, 1), image=image - image % patch or patch)


_LATENT = re.compile(r"\bmla\b|latent attention|deepseek[-_ ]?v?[23]|deepseek[-_ ]?r1|kimi|moonlight")
_LATENT_SIZES = LatentAttention(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, q_rank=1536)
"""Sizes of DeepSeek-V2, section 3.1.2, and DeepSeek-V3, section 4.2."""


def build_experts(row: Row, known: Transformer | None, hidden: int, layers: int) -> Experts | None:
    """Return the mixture of experts of a row, or None for a dense model."""
    count = row.optional_count("moe_experts", MAX_EXPERTS)
    base = known.experts if known else None
    if count in (None, 1) and base is None:
        return None
    base = base if base is not None and count in (None, base.count) else None
    if count is None and base is not None:
        row.assume(f"{base.count} experts, {base.top_k} a token (not stated; of the model named)")
    top_k = row.optional_count("moe_topk", MAX_EXPERTS) or (base.top_k if base else 2)
    if not row.states("moe_topk"):
        row.assume(f"moe_topk {top_k} (not stated)")
    stated_ffn = row.optional_count("moe_ffn_hidden", MAX_WIDTH)
    ffn = stated_ffn or (base.ffn if base else None) or row.optional_count("ffn_hidden", MAX_WIDTH)
    if stated_ffn is None:
        ffn = ffn or 4 * hidden
        row.assume(f"moe_ffn_hidden {ffn} (not stated)")
    ffn = pad_to_ranks(row, "moe_ffn_hidden", ffn or hidden)
    count = count or (base.count if base else 1)
    row.assume("tokens are spread evenly over experts (not stated)")
    dense = min(row.optional_count("n_dense_layers", MAX_LAYERS) or (base.dense_layers if base else 0), layers - 1)
    shared = _count_shared_experts(row, base, ffn)
    return Experts(count, min(top_k, count), ffn, shared, dense, base.score_bias if base else False)


def _count_shared_experts(row: Row, base: Experts | None, ffn: int) -> int:
    width = row.optional_count("moe_shared_ffn_hidden", MAX_WIDTH)
    if width is None:
        shared = base.shared if base and "moe_shared_ffn_hidden" not in row.fields else 0
        if shared:
            row.assume(f"{shared} shared experts (not stated; of the model named)")
        return shared
    if width % ffn:
        row.assume(f"moe_shared_ffn_hidden {width} taken as {ceil(width / ffn)} experts of {ffn}")
    return ceil(width / ffn)


def build_latent(row: Row, words: str, known: Transformer | None, has_experts: bool) -> LatentAttention | None:
    """Return the sizes of latent attention, which are always assumed since no row states them, or None without it."""
    known_latent = known.latent if known else None
    if known_latent is None and (not has_experts or not _LATENT.search(words)):
        return None
    sizes = known_latent or _LATENT_SIZES
    ranks = f"ranks {sizes.kv_rank} and {sizes.q_rank or 'none for queries'}"
    origin = "the model named" if known_latent else "DeepSeek"
    row.assume(f"latent attention with {ranks} (a row states none; of {origin})")
    return sizes


def _build_family(ffn_kind: str, *, tied: bool = False, positions: str = "rotary", **fields: Any) -> Transformer:
    """Return a decoder whose sizes are all 1, for the members of its family to replace."""
    return Transformer(1, 1, 1, 1, 1, 1, ffn_kind, tied, positions=positions, **fields)


# a family has the name of its best-known member: Mistral belongs to Llama, GLM to Qwen 2
_LLAMA, _TIED_LLAMA = _build_family("swiglu"), _build_family("swiglu", tied=True)
_QWEN2, _TIED_QWEN2 = (_build_family("swiglu", tied=tied, biases="qkv") for tied in (False, True))
_QWEN3, _TIED_QWEN3 = (_build_family("swiglu", tied=tied, qk_norm=True) for tied in (False, True))
_GEMMA, _GEMMA3 = _build_family("geglu", tied=True), _build_family("geglu", tied=True, qk_norm=True)
_NEMOTRON = _build_family("gelu", biases="none")
"""Squared ReLU with two matrices, no biases, untied embeddings."""
_GPT2 = _build_family("gelu", tied=True, positions="learned")
_MPT = replace(_GPT2, biases="none")
_NEOX = _build_family("gelu", parallel_residual=True)
_FALCON = _build_family("gelu", tied=True, biases="none", parallel_residual=True)

_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def _member(family: Transformer, *sizes: int, head: int | None = None, experts: Experts | None = None) -> Transformer:
    """Return the decoder of a family with the sizes of `_SIZES`; a head has ``head`` channels or hidden / heads."""
    named_sizes: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    return replace(family, **named_sizes, kv_channels=head, experts=experts)


_SPECS: tuple[tuple[str, Transformer], ...] = (
    # Touvron et al. 2023, "LLaMA", table 2; Llama 3.2 and Code Llama as released (config.json)
    (r"llama3?\.21b", _member(_TIED_LLAMA, 16, 2048, 32, 8, 8192, 128256, head=64)),
    (r"llama3?\.23b", _member(_TIED_LLAMA, 28, 3072, 24, 8, 8192, 128256, head=128)),
    (r"codellama34b", _member(_LLAMA, 48, 8192, 64, 8, 22016, 32016)),
    (r"llama1?(30b|33b|32b)", _member(_LLAMA, 60, 6656, 52, 52, 17920, 32000)),
    (r"llama1?65b", _member(_LLAMA, 80, 8192, 64, 64, 22016, 32000)),
    (r"tinyllama|llama1\.1b", _member(_LLAMA, 22, 2048, 32, 4, 5632, 32000)),
    # released configurations (config.json on the Hugging Face hub)
    (r"mistralnemo|mistral12b", _member(_LLAMA, 40, 5120, 32, 8, 14336, 131072, head=128)),
    (r"mistral(large)?(123b|2407)", _member(_LLAMA, 88, 12288, 96, 8, 28672, 32768)),
    (r"mistralsmall|mistral24b", _member(_LLAMA, 40, 5120, 32, 8, 32768, 131072, head=128)),
    (r"qwen2?\.?50\.5b|qwen20\.5b", _member(_TIED_QWEN2, 24, 896, 14, 2, 4864, 151936)),
    (r"qwen2?\.?51\.5b|qwen21\.5b", _member(_TIED_QWEN2, 28, 1536, 12, 2, 8960, 151936)),
    (r"qwen2?\.53b", _member(_TIED_QWEN2, 36, 2048, 16, 2, 11008, 151936)),
    (r"qwen(2|2\.5)7b", _member(_QWEN2, 28, 3584, 28, 4, 18944, 152064)),
    (r"qwen(2\.5)?14b", _member(_QWEN2, 48, 5120, 40, 8, 13824, 152064)),
    (r"qwen(2\.5)32b|qwq32b", _member(_QWEN2, 64, 5120, 40, 8, 27648, 152064)),
    (r"qwen(2|2\.5)?72b", _member(_QWEN2, 80, 8192, 64, 8, 29568, 152064)),
    (r"qwen(1\.5)?7b", _member(_QWEN2, 32, 4096, 32, 32, 11008, 151936)),
    (r"qwen30\.6b", _member(_TIED_QWEN3, 28, 1024, 16, 8, 3072, 151936, head=128)),
    (r"qwen31\.7b", _member(_TIED_QWEN3, 28, 2048, 16, 8, 6144, 151936, head=128)),
    (r"qwen34b", _member(_TIED_QWEN3, 36, 2560, 32, 8, 9728, 151936, head=128)),
    (r"qwen314b", _member(_QWEN3, 40, 5120, 40, 8, 17408, 151936, head=128)),
    (r"qwen332b", _member(_QWEN3, 64, 5120, 64, 8, 25600, 151936, head=128)),
    (r"gemma2b", _member(_GEMMA, 18, 2048, 8, 1, 16384, 256000, head=256)),
    (r"gemma7b", _member(_GEMMA, 28, 3072, 16, 16, 24576, 256000, head=256)),
    (r"gemma22b", _member(_GEMMA, 26, 2304, 8, 4, 9216, 256000, head=256)),
    (r"gemma29b", _member(_GEMMA, 42, 3584, 16, 8, 14336, 256000, head=256)),
    (r"gemma227b", _member(_GEMMA, 46, 4608, 32, 16, 36864, 256000, head=128)),
    (r"gemma327b", _member(_GEMMA3, 62, 5376, 32, 16, 21504, 262208, head=128)),
    (r"gemma312b", _member(_GEMMA3, 48, 3840, 16, 8, 15360, 262208, head=256)),
    (r"gemma34b", _member(_GEMMA3, 34, 2560, 8, 4, 10240, 262208, head=256)),
    (r"yi6b", _member(_LLAMA, 32, 4096, 32, 4, 11008, 64000)),
    (r"yi34b", _member(_LLAMA, 60, 7168, 56, 8, 20480, 64000)),
    (r"baichuan2?7b", _member(_LLAMA, 32, 4096, 32, 32, 11008, 125696)),
    (r"baichuan2?13b", _member(_LLAMA, 40, 5120, 40, 40, 13696, 125696)),
    (r"internlm2?(\.5)?7b", _member(_LLAMA, 32, 4096, 32, 8, 14336, 92544)),
    (r"internlm2?(\.5)?20b", _member(_LLAMA, 48, 6144, 48, 8, 16384, 92544)),
    (r"glm49b", _member(_QWEN2, 40, 4096, 32, 2, 13696, 151552)),
    (r"chatglm[23]?6b", _member(_QWEN2, 28, 4096, 32, 2, 13696, 65024)),
    (r"deepseek(llm|coder)?7b", _member(_LLAMA, 30, 4096, 32, 32, 11008, 102400)),
    (r"deepseek(coder)?33b", _member(_LLAMA, 62, 7168, 56, 8, 19200, 32256)),
    (r"deepseek(llm)?67b", _member(_LLAMA, 95, 8192, 64, 8, 22016, 102400)),
    (r"olmo2?7b", _member(_LLAMA, 32, 4096, 32, 32, 11008, 50304)),
    (r"phi3mini|phi33\.8b", _member(_LLAMA, 32, 3072, 32, 32, 8192, 32064)),
    (r"phi3medium|phi414b|phi4$", _member(_LLAMA, 40, 5120, 40, 10, 17920, 100352)),
    (r"palm540b", _member(_TIED_LLAMA, 118, 18432, 48, 1, 73728, 256000, head=256)),
    # mixtures of experts as released
    (r"grok1", _member(_LLAMA, 64, 6144, 48, 8, 32768, 131072, experts=Experts(8, 2, 32768))),
    (r"dbrx", _member(_LLAMA, 40, 6144, 48, 8, 10752, 100352, experts=Experts(16, 4, 10752))),
    (
        r"qwen1?\.?5?moea2\.7b|qwenmoe",
        _member(_LLAMA, 24, 2048, 16, 16, 5632, 151936, experts=Experts(60, 4, 1408, shared=4)),
    ),
    (r"qwen257ba14b", _member(_LLAMA, 28, 3584, 28, 4, 18944, 151936, experts=Experts(64, 8, 2560, shared=8))),
    (r"gptoss20b", _member(_LLAMA, 24, 2880, 64, 8, 2880, 201088, head=64, experts=Experts(32, 4, 2880))),
    (r"gptoss120b", _member(_LLAMA, 36, 2880, 64, 8, 2880, 201088, head=64, experts=Experts(128, 4, 2880))),
    (r"llama4scout", _member(_LLAMA, 48, 5120, 40, 8, 16384, 202048, head=128, experts=Experts(16, 1, 8192, shared=1))),
    (r"olmoe", _member(_LLAMA, 16, 2048, 16, 16, 1024, 50304, experts=Experts(64, 8, 1024))),
    # Parmar et al. 2024, "Nemotron-4 15B", table 1; NVIDIA 2024, "Nemotron-4 340B", table 1; the others from NeMo
    (r"nemotron[34]?8b", _member(_NEMOTRON, 32, 4096, 32, 32, 16384, 256000)),
    (r"nemotron4?15b", _member(_NEMOTRON, 32, 6144, 48, 8, 24576, 256000)),
    (r"nemotron[34]?22b", _member(_NEMOTRON, 40, 6144, 48, 48, 24576, 256000)),
    (r"nemotron4?340b", _member(_NEMOTRON, 96, 18432, 96, 8, 73728, 256000)),
    # Radford et al. 2019, table 2; Zhang et al. 2022, "OPT", table 1; Black et al. 2022, "GPT-NeoX-20B"
    (r"gpt2(xl|1\.5b|1\.6b)", _member(_GPT2, 48, 1600, 25, 25, 6400, 50257)),
    (r"gpt2(large|774m|762m)", _member(_GPT2, 36, 1280, 20, 20, 5120, 50257)),
    (r"gpt2(medium|345m|350m|355m)", _member(_GPT2, 24, 1024, 16, 16, 4096, 50257)),
    (r"gpt2(small|117m|124m|125m)?$", _member(_GPT2, 12, 768, 12, 12, 3072, 50257)),
    (r"opt125m", _member(_GPT2, 12, 768, 12, 12, 3072, 50272)),
    (r"opt350m", _member(_GPT2, 24, 1024, 16, 16, 4096, 50272)),
    (r"opt1\.3b", _member(_GPT2, 24, 2048, 32, 32, 8192, 50272)),
    (r"opt2\.7b", _member(_GPT2, 32, 2560, 32, 32, 10240, 50272)),
    (r"opt6\.7b", _member(_GPT2, 32, 4096, 32, 32, 16384, 50272)),
    (r"opt13b", _member(_GPT2, 40, 5120, 40, 40, 20480, 50272)),
    (r"opt30b", _member(_GPT2, 48, 7168, 56, 56, 28672, 50272)),
    (r"opt66b", _member(_GPT2, 64, 9216, 72, 72, 36864, 50272)),
    (r"opt175b", _member(_GPT2, 96, 12288, 96, 96, 49152, 50272)),
    (r"neox20b|gptneox", _member(_NEOX, 44, 6144, 64, 64, 24576, 50432)),
    (r"gptj", _member(_NEOX, 28, 4096, 16, 16, 16384, 50400)),
    (r"bloom(176b)?$", _member(_GPT2, 70, 14336, 112, 112, 57344, 250880)),
    (r"bloom7\.?1?b", _member(_GPT2, 30, 4096, 32, 32, 16384, 250880)),
    (r"falcon7b", _member(_FALCON, 32, 4544, 71, 1, 18176, 65024)),
    (r"falcon40b", _member(_FALCON, 60, 8192, 128, 8, 32768, 65024)),
    (r"falcon180b", _member(_FALCON, 80, 14848, 232, 8, 59392, 65024)),
    (r"starcoder$|starcoder15", _member(_GPT2, 40, 6144, 48, 1, 24576, 49152)),
    (r"mpt7b", _member(_MPT, 32, 4096, 32, 32, 16384, 50368)),
    (r"mpt30b", _member(_MPT, 48, 7168, 64, 64, 28672, 50368)),
    # Brown et al. 2020, table 2.1, and NeMo's configurations of the same names
    (r"gpt3?760m", _member(_GPT2, 24, 1536, 16, 16, 6144, 51200)),
    (r"gpt3?(350m|345m)", _member(_GPT2, 24, 1024, 16, 16, 4096, 51200)),
    (r"gpt3?2\.7b", _member(_GPT2, 32, 2560, 32, 32, 10240, 51200)),
    (r"gpt3?5b", _member(_GPT2, 24, 4096, 32, 32, 16384, 51200)),
    (r"gpt3?20b", _member(_GPT2, 44, 6144, 48, 48, 24576, 51200)),
    (r"gpt3?40b", _member(_GPT2, 48, 8192, 64, 64, 32768, 51200)),
    (r"gpt3?126m", _member(_GPT2, 12, 768, 12, 12, 3072, 51200)),
)

_PRESETS: tuple[tuple[str, str], ...] = (
    (r"llama3(\.\d)?405b", "llama3-405b"),
    (r"llama3(\.\d)?70b", "llama3-70b"),
    (r"llama3(\.\d)?8b", "llama3-8b"),
    (r"llama2?70b", "llama2-70b"),
    (r"llama[12]?13b", "llama2-13b"),
    (r"llama[12]?(7b|6\.7b)", "llama2-7b"),
    (r"mixtral(8x)?22b", "mixtral-8x22b"),
    (r"mixtral", "mixtral-8x7b"),
    (r"mistral", "mistral-7b"),
    (r"deepseekv2lite|deepseekcoderv2lite|deepseekv216b", "deepseek-v2-lite"),
    (r"deepseekv2", "deepseek-v2"),
    (r"deepseek(v3|r1|671b)", "deepseek-v3"),
    (r"qwen38b", "qwen3-8b"),
    (r"qwen330b|qwen3moe30b", "qwen3-30b-a3b"),
    (r"qwen3235b", "qwen3-235b-a22b"),
    (r"gpt3?175b|^gpt3$", "gpt3-175b"),
    (r"gpt3?13b", "gpt3-13b"),
    (r"gpt3?(6\.7b|7b)", "gpt3-6.7b"),
    (r"gpt3?1\.3b", "gpt3-1.3b"),
    (r"gpt3?125m", "gpt3-125m"),
    (r"(gpt|megatron)145b", "megatron-145b"),
    (r"(gpt|megatron|turing|mtnlg)530b", "megatron-530b"),
    (r"(gpt|megatron)(1t|1008b)", "megatron-1t"),
    (r"bertlarge|bert340m", "bert-large"),
    (r"bertbase|bert110m|^bert$", "bert-base"),
    (r"t5small", "t5-small"),
    (r"t5large", "t5-large"),
    (r"t53b|t5xl$", "t5-3b"),
    (r"t511b|t5xxl", "t5-11b"),
    (r"t5base|^t5$", "t5-base"),
    (r"vit(h|huge)", "vit-h-14"),
    (r"vit(l|large)", "vit-l-16"),
    (r"vit(b|base)|^vit$", "vit-b-16"),
    (r"(?<!wide)resnet152", "resnet-152"),
    (r"(?<!wide)resnet101", "resnet-101"),
    (r"^resnet|(?<!wide)resnet(?=50|$)", "resnet-50"),
    (r"dlrm(dcn)?v2", "dlrm-dcnv2"),
    (r"dlrm", "dlrm-criteo"),
    (r"stablediffusion(v?1|$)|sd1\.?5|latentdiffusion", "stable-diffusion-1.5"),
)  # fmt: skip

_TABLE = tuple((re.compile(pattern), spec) for pattern, spec in _SPECS) + tuple(
    (re.compile(pattern), MODELS[name]) for pattern, name in _PRESETS
)


def find_model(name: str) -> Model | None:
    """Return the model with the published name ``name``, or None.

    >>> find_model("meta-llama/Llama-3.2-1B").layers
    16
    >>> find_model("LLAMA3_70B LoRA").name, find_model("our model") is None
    ('llama3-70b', True)
    """
    compact_name = re.sub(r"[^a-z0-9.]", "", name.lower()[:200])
    known_spec = next((spec for pattern, spec in _TABLE if pattern.search(compact_name)), None)
    if isinstance(known_spec, Transformer):
        return replace(known_spec, window=None, name=known_spec.name if known_spec.name in MODELS else compact_name)
    return known_spec


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
    (
        "other",
        re.compile(r"\bdit\b|diffusion|mamba|\bssm\b|state space|rwkv|whisper|speech|clip\b|multimodal|vlm|swin|cnn"),
    ),
)


def build_model(row: Row) -> Model:
    """Return the model of a row; raise `Skip` where neither its sizes nor its name determine one."""
    words = row.text("arch", "model")
    known = find_model(row.text("model"))
    family = _find_family(row)
    if family in ENCODERS:
        return build_encoder(row, family, words, known)
    if family in ("image", "dlrm", "diffusion"):
        if known is None:
            raise Skip(f"arch is of a {family} model, whose sizes a row cannot state, and model names none known")
        row.assume(f"the sizes of {known.name}, which the row names")
        return known
    if family == "other" and known is None:
        if not (row.optional_count("n_layers") and row.optional_count("hidden")):
            raise Skip(f"arch {row.text('arch') or row.text('model')!r:.60} is not expressed by the simulator")
        row.assume(f"a decoder transformer of its sizes: how a layer of {words[:40]!r} works {NOT_UNDERSTOOD}")
    return _build_decoder(row, words, known if isinstance(known, Transformer) else None)


def _find_family(row: Row) -> str:
    """Return the family that ``arch`` says; where it says none or just a decoder, the one of the model's name."""
    row.note_words("arch")
    word = row.reading("arch").word
    if word not in ("", "decoder"):
        return word
    name = row.text("model")
    return next((family for family, pattern in _FAMILIES if pattern.search(name)), word)


def _build_decoder(row: Row, words: str, known: Transformer | None) -> Transformer:
    base = known or _guess_decoder(row, words)
    layers, hidden = _read_outer_sizes(row, known)
    heads = pad_to_ranks(row, "n_heads", _read_size(row, "n_heads", known, MAX_HEADS) or _count_heads(row, hidden))
    kv_heads = _count_kv_heads(row, heads, known)
    kind = _ffn_kind(row, base)
    experts = build_experts(row, known, hidden, layers)
    latent = build_latent(row, words, known, experts is not None)
    attention = _choose_attention(row, words)
    head = _head_dim(row, hidden, heads, known) if latent is None else None
    return replace(
        base,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else kv_heads,
        ffn=pad_to_ranks(
            row,
            "ffn_hidden",
            _read_size(row, "ffn_hidden", known, MAX_WIDTH) or _ffn_width(row, hidden, kind, experts),
        ),
        vocab=pad_vocabulary(row, _read_size(row, "vocab", known, MAX_WIDTH) or family_vocab(row, words)),
        ffn_kind=kind,
        tied_embeddings=_ties_embeddings(row, base, known),
        attention=attention,
        dropout=_has_dropout(row, attention, kind),
        positions="rotary" if latent else base.positions,
        kv_channels=head,
        qk_norm=latent is None and (base.qk_norm or row.says("qk_norm", "plan_note", "arch")),
        experts=experts,
        latent=latent,
        name=base.name if known else "transformer",
    )


def _guess_decoder(row: Row, words: str) -> Transformer:
    """Return a decoder with a family's kind of layer; all sizes are 1, for the caller to replace."""
    kind = row.read_word("ffn_type")
    is_gated = kind in ("swiglu", "geglu") if kind else bool(_GATED.search(words))
    if not row.states("arch"):
        row.assume(f"a decoder transformer like {'Llama' if is_gated else 'GPT'} (arch not stated)")
    if is_gated:
        return _LLAMA
    is_rotary = bool(re.search(r"rotary|rope|alibi|neox|nemotron|falcon", words))
    biases = "none" if re.search(r"no bias|nemotron|falcon|mpt", words) else None
    is_parallel = bool(re.search(r"neox|gpt-?j|falcon|pythia", words))
    positions = "rotary" if is_rotary and "learned" not in words else "learned"
    return Transformer(1, 1, 1, 1, 1, 1, positions=positions, biases=biases, parallel_residual=is_parallel)


_ATTRIBUTES = {"n_layers": "layers", "hidden": "hidden", "n_heads": "heads", "ffn_hidden": "ffn", "vocab": "vocab"}


def _read_size(row: Row, field: str, known: Transformer | None, max_size: int) -> int | None:
    """Return a size that the row states, or else that of the known model; None without either."""
    is_needed = field in ("n_layers", "hidden") and known is None and not row.states("n_params")
    value = row.count(field, max_size) if is_needed else row.optional_count(field, max_size)
    if value is not None or known is None:
        return value
    known_size = int(getattr(known, _ATTRIBUTES[field]))
    row.assume(f"{field} {known_size} (not stated; of the model named)")
    return known_size


def _read_outer_sizes(row: Row, known: Transformer | None) -> tuple[int, int]:
    layers = _read_size(row, "n_layers", known, MAX_LAYERS)
    hidden = _read_size(row, "hidden", known, 1_000_000)
    if layers is None and hidden is None:
        return _guess_sizes(row)
    if layers is None or hidden is None:
        num_parameters = row.optional_number("n_params") or _read_params(row)
        if num_parameters is None:
            missing = "n_layers" if layers is None else "hidden"
            raise Skip(f"{missing} is not stated, and model names none that is known")
        hidden = hidden or max(128, 128 * round((num_parameters / (12 * (layers or 1))) ** 0.5 / 128))
        layers = layers or max(1, min(round(num_parameters / (12 * hidden**2)), MAX_LAYERS))
        row.assume(f"{layers} layers of hidden {hidden} from the number of parameters: 12 * layers * hidden^2")
    return layers, hidden


def _read_params(row: Row) -> float | None:
    """Return the number of parameters in a model's name, as in ``GPT 20B``, or None."""
    matches = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*([mbt])\b", row.text("model"))
    return float(matches[-1][0]) * {"m": 1e6, "b": 1e9, "t": 1e12}[matches[-1][1]] if matches else None


def _guess_sizes(row: Row) -> tuple[int, int]:
    """Return layers and hidden size guessed from the number of parameters, with hidden = 128 * layers.

    In Brown et al. 2020, table 2.1, hidden / layers is 64 to 128.
    """
    params = row.optional_number("n_params") or _read_params(row)
    if params is None or params > 1e14:
        raise Skip("n_layers and hidden are not stated, and model names none that is known")
    layers = max(2, round((params / (12 * 128**2)) ** (1 / 3)))
    hidden = max(128, 128 * round((params / (12 * layers)) ** 0.5 / 128))
    row.assume(f"{layers} layers of hidden {hidden}, guessed from {params / 1e9:.3g} billion parameters")
    return min(layers, MAX_LAYERS), hidden


def _count_heads(row: Row, hidden: int) -> int:
    width = row.optional_count("head_dim", MAX_WIDTH) or (128 if hidden % 128 == 0 else 64)
    heads = max(1, hidden // width)
    row.assume(f"n_heads {heads} (not stated; heads of {width})")
    return heads


def _count_kv_heads(row: Row, heads: int, known: Transformer | None) -> int:
    default = known.kv_heads if known and heads == known.heads else heads
    kv_heads = row.optional_count("n_kv_heads", MAX_HEADS) or default
    if not row.states("n_kv_heads"):
        row.assume(f"n_kv_heads {kv_heads} (not stated)")
    tensor = row.count("tp") or 1
    if heads % kv_heads:
        row.assume(f"n_kv_heads {heads}: {kv_heads} do not divide {heads} heads")
        kv_heads = heads
    if kv_heads % tensor and heads % tensor == 0:
        repeated_heads = lcm(kv_heads, tensor)
        kv_heads = repeated_heads if heads % repeated_heads == 0 else heads
        row.assume(f"keys and values repeated to {kv_heads} heads for tensor({tensor}) ranks")
    return kv_heads


def _head_dim(row: Row, hidden: int, heads: int, known: Transformer | None) -> int | None:
    stated_dim = row.optional_count("head_dim", MAX_WIDTH)
    width = stated_dim or (known.kv_channels if known and known.hidden == hidden else None)
    if width is None and hidden % heads:
        width = -(-hidden // heads)
        row.assume(f"head_dim {width} (not stated; {heads} heads do not divide hidden {hidden})")
    return width if width is not None and width * heads != hidden else None


def _ffn_kind(row: Row, base: Transformer) -> str:
    return row.read_word("ffn_type", base.ffn_kind)


def _ffn_width(row: Row, hidden: int, kind: str, experts: Experts | None) -> int:
    if experts is not None:
        return experts.ffn
    # Touvron et al. 2023, "LLaMA", section 2.2: 2/3 of 4 hidden, in multiples of 256 as released
    ffn = 4 * hidden if kind == "gelu" else 256 * ceil(8 * hidden / 3 / 256)
    row.assume(f"ffn_hidden {ffn} (not stated; the rule of {kind})")
    return ffn


def _ties_embeddings(row: Row, base: Transformer, known: Transformer | None) -> bool:
    tied = row.flag("tied_embeddings")
    if tied is None:
        tied = base.tied_embeddings
        row.assume(f"tied_embeddings {str(tied).lower()} (not stated{'; of the model named' if known else ''})")
    return tied


_BEFORE_FLASH = re.compile(r"megatron|deepspeed|colossal|fairseq|alpa|gshard")
_KERNELS = {"flash_1": "flash_1", "flash_2": "flash_2", "flash_3": "flash", "flash_triton": "flash_triton"}
"""Fused attention kernels of the simulator by the words that name one; the framework says which "flash" is."""


def _choose_attention(row: Row, words: str) -> str:
    """Return the attention kernel of a row, "unfused" where the scores are written to memory."""
    word = row.read_word("attention_kernel")
    if word in _KERNELS:
        kernel = _KERNELS[word]
        if kernel != "flash":
            row.assume(f"attention by {kernel} (from {row.text('attention_kernel')[:40]})")
        return kernel
    if word == "unfused":
        return word
    return attention_kernel(row) if word == "flash" or _has_flash(row, words) else "unfused"


def _has_dropout(row: Row, attention: str, ffn_kind: str) -> bool:
    """Return whether layers have dropout: as a model of the time before fused attention, or as the framework's own."""
    if attention == "unfused":
        return True
    has_default = find_entry(row).defaults.dropout and ffn_kind == "gelu"
    if has_default:
        row.assume("dropout (not stated; the framework's default for models without gates)")
    return has_default


_EARLY = ("v100", "p100", "a100", "t4", "titan v", "titan rtx", "rtx 2080", "ascend 910")


def _has_flash(row: Row, words: str) -> bool:
    """Return whether a run that states no attention kernel had a fused one, and note that as an assumption."""
    is_early = row.reading("accelerator").word in _EARLY
    is_gpt = not _GATED.search(words) and _BEFORE_FLASH.search(row.text("framework"))
    flash = not (is_early and is_gpt)
    unfused = "unfused attention and dropout, as Megatron-LM without flash had"
    row.assume(f"{'flash attention' if flash else unfused} (not stated)")
    return flash
