"""Sizes of released models by what publishers call them, beyond those of `simulator.models.presets`."""

import re
from dataclasses import replace

from simulator.models.experts import Experts
from simulator.models.model import Model
from simulator.models.presets import MODELS
from simulator.models.transformer import Transformer


def _gated(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, experts: Experts | None = None,
    head: int | None = None, tied: bool = False, kind: str = "swiglu", qkv: bool = False, qk_norm: bool = False,
) -> Transformer:  # fmt: skip
    return Transformer(
        layers, hidden, heads, kv_heads, ffn, vocab, kind, tied, positions="rotary", kv_channels=head,
        experts=experts, biases="qkv" if qkv else None, qk_norm=qk_norm,
    )  # fmt: skip


def _plain(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool = True,
    positions: str = "learned", biases: str | None = None, parallel: bool = False,
) -> Transformer:  # fmt: skip
    return Transformer(
        layers, hidden, heads, kv_heads, ffn, vocab, "gelu", tied, positions=positions, biases=biases,
        parallel_residual=parallel,
    )  # fmt: skip


def _squared(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int = 256000) -> Transformer:
    """Return a Nemotron: squared ReLU with two matrices, no biases, rotary positions, untied embeddings."""
    return _plain(layers, hidden, heads, kv_heads, 4 * hidden, vocab, tied=False, positions="rotary", biases="none")


_WRITTEN: tuple[tuple[str, Transformer], ...] = (
    # Touvron et al. 2023, "LLaMA", table 2; Llama 3.2 and Code Llama as released (config.json)
    (r"llama3?\.21b", _gated(16, 2048, 32, 8, 8192, 128256, head=64, tied=True)),
    (r"llama3?\.23b", _gated(28, 3072, 24, 8, 8192, 128256, head=128, tied=True)),
    (r"codellama34b", _gated(48, 8192, 64, 8, 22016, 32016)),
    (r"llama1?(30b|33b|32b)", _gated(60, 6656, 52, 52, 17920, 32000)),
    (r"llama1?65b", _gated(80, 8192, 64, 64, 22016, 32000)),
    (r"tinyllama|llama1\.1b", _gated(22, 2048, 32, 4, 5632, 32000)),
    # released configurations (config.json on the Hugging Face hub)
    (r"mistralnemo|mistral12b", _gated(40, 5120, 32, 8, 14336, 131072, head=128)),
    (r"mistral(large)?(123b|2407)", _gated(88, 12288, 96, 8, 28672, 32768)),
    (r"mistralsmall|mistral24b", _gated(40, 5120, 32, 8, 32768, 131072, head=128)),
    (r"qwen2?\.?50\.5b|qwen20\.5b", _gated(24, 896, 14, 2, 4864, 151936, tied=True, qkv=True)),
    (r"qwen2?\.?51\.5b|qwen21\.5b", _gated(28, 1536, 12, 2, 8960, 151936, tied=True, qkv=True)),
    (r"qwen2?\.53b", _gated(36, 2048, 16, 2, 11008, 151936, tied=True, qkv=True)),
    (r"qwen(2|2\.5)7b", _gated(28, 3584, 28, 4, 18944, 152064, qkv=True)),
    (r"qwen(2\.5)?14b", _gated(48, 5120, 40, 8, 13824, 152064, qkv=True)),
    (r"qwen(2\.5)32b|qwq32b", _gated(64, 5120, 40, 8, 27648, 152064, qkv=True)),
    (r"qwen(2|2\.5)?72b", _gated(80, 8192, 64, 8, 29568, 152064, qkv=True)),
    (r"qwen(1\.5)?7b", _gated(32, 4096, 32, 32, 11008, 151936, qkv=True)),
    (r"qwen30\.6b", _gated(28, 1024, 16, 8, 3072, 151936, head=128, tied=True, qk_norm=True)),
    (r"qwen31\.7b", _gated(28, 2048, 16, 8, 6144, 151936, head=128, tied=True, qk_norm=True)),
    (r"qwen34b", _gated(36, 2560, 32, 8, 9728, 151936, head=128, tied=True, qk_norm=True)),
    (r"qwen314b", _gated(40, 5120, 40, 8, 17408, 151936, head=128, qk_norm=True)),
    (r"qwen332b", _gated(64, 5120, 64, 8, 25600, 151936, head=128, qk_norm=True)),
    (r"gemma2b", _gated(18, 2048, 8, 1, 16384, 256000, head=256, tied=True, kind="geglu")),
    (r"gemma7b", _gated(28, 3072, 16, 16, 24576, 256000, head=256, tied=True, kind="geglu")),
    (r"gemma22b", _gated(26, 2304, 8, 4, 9216, 256000, head=256, tied=True, kind="geglu")),
    (r"gemma29b", _gated(42, 3584, 16, 8, 14336, 256000, head=256, tied=True, kind="geglu")),
    (r"gemma227b", _gated(46, 4608, 32, 16, 36864, 256000, head=128, tied=True, kind="geglu")),
    (r"gemma327b", _gated(62, 5376, 32, 16, 21504, 262208, head=128, tied=True, kind="geglu", qk_norm=True)),
    (r"gemma312b", _gated(48, 3840, 16, 8, 15360, 262208, head=256, tied=True, kind="geglu", qk_norm=True)),
    (r"gemma34b", _gated(34, 2560, 8, 4, 10240, 262208, head=256, tied=True, kind="geglu", qk_norm=True)),
    (r"yi6b", _gated(32, 4096, 32, 4, 11008, 64000)),
    (r"yi34b", _gated(60, 7168, 56, 8, 20480, 64000)),
    (r"baichuan2?7b", _gated(32, 4096, 32, 32, 11008, 125696)),
    (r"baichuan2?13b", _gated(40, 5120, 40, 40, 13696, 125696)),
    (r"internlm2?(\.5)?7b", _gated(32, 4096, 32, 8, 14336, 92544)),
    (r"internlm2?(\.5)?20b", _gated(48, 6144, 48, 8, 16384, 92544)),
    (r"glm49b", _gated(40, 4096, 32, 2, 13696, 151552, qkv=True)),
    (r"chatglm[23]?6b", _gated(28, 4096, 32, 2, 13696, 65024, qkv=True)),
    (r"deepseek(llm|coder)?7b", _gated(30, 4096, 32, 32, 11008, 102400)),
    (r"deepseek(coder)?33b", _gated(62, 7168, 56, 8, 19200, 32256)),
    (r"deepseek(llm)?67b", _gated(95, 8192, 64, 8, 22016, 102400)),
    (r"olmo2?7b", _gated(32, 4096, 32, 32, 11008, 50304)),
    (r"phi3mini|phi33\.8b", _gated(32, 3072, 32, 32, 8192, 32064)),
    (r"phi3medium|phi414b|phi4$", _gated(40, 5120, 40, 10, 17920, 100352)),
    (r"palm540b", _gated(118, 18432, 48, 1, 73728, 256000, head=256, tied=True)),
    # mixtures of experts as released
    (r"grok1", _gated(64, 6144, 48, 8, 32768, 131072, experts=Experts(8, 2, 32768))),
    (r"dbrx", _gated(40, 6144, 48, 8, 10752, 100352, experts=Experts(16, 4, 10752))),
    (r"qwen1?\.?5?moea2\.7b|qwenmoe", _gated(24, 2048, 16, 16, 5632, 151936, experts=Experts(60, 4, 1408, shared=4))),
    (r"qwen257ba14b", _gated(28, 3584, 28, 4, 18944, 151936, experts=Experts(64, 8, 2560, shared=8))),
    (r"gptoss20b", _gated(24, 2880, 64, 8, 2880, 201088, head=64, experts=Experts(32, 4, 2880))),
    (r"gptoss120b", _gated(36, 2880, 64, 8, 2880, 201088, head=64, experts=Experts(128, 4, 2880))),
    (r"llama4scout", _gated(48, 5120, 40, 8, 16384, 202048, head=128, experts=Experts(16, 1, 8192, shared=1))),
    (r"olmoe", _gated(16, 2048, 16, 16, 1024, 50304, experts=Experts(64, 8, 1024))),
    # Parmar et al. 2024, "Nemotron-4 15B", table 1; NVIDIA 2024, "Nemotron-4 340B", table 1; the others from NeMo
    (r"nemotron[34]?8b", _squared(32, 4096, 32, 32)),
    (r"nemotron4?15b", _squared(32, 6144, 48, 8)),
    (r"nemotron[34]?22b", _squared(40, 6144, 48, 48)),
    (r"nemotron4?340b", _squared(96, 18432, 96, 8)),
    # Radford et al. 2019, table 2; Zhang et al. 2022, "OPT", table 1; Black et al. 2022, "GPT-NeoX-20B"
    (r"gpt2(xl|1\.5b|1\.6b)", _plain(48, 1600, 25, 25, 6400, 50257)),
    (r"gpt2(large|774m|762m)", _plain(36, 1280, 20, 20, 5120, 50257)),
    (r"gpt2(medium|345m|350m|355m)", _plain(24, 1024, 16, 16, 4096, 50257)),
    (r"gpt2(small|117m|124m|125m)?$", _plain(12, 768, 12, 12, 3072, 50257)),
    (r"opt125m", _plain(12, 768, 12, 12, 3072, 50272)),
    (r"opt350m", _plain(24, 1024, 16, 16, 4096, 50272)),
    (r"opt1\.3b", _plain(24, 2048, 32, 32, 8192, 50272)),
    (r"opt2\.7b", _plain(32, 2560, 32, 32, 10240, 50272)),
    (r"opt6\.7b", _plain(32, 4096, 32, 32, 16384, 50272)),
    (r"opt13b", _plain(40, 5120, 40, 40, 20480, 50272)),
    (r"opt30b", _plain(48, 7168, 56, 56, 28672, 50272)),
    (r"opt66b", _plain(64, 9216, 72, 72, 36864, 50272)),
    (r"opt175b", _plain(96, 12288, 96, 96, 49152, 50272)),
    (r"neox20b|gptneox", _plain(44, 6144, 64, 64, 24576, 50432, tied=False, positions="rotary", parallel=True)),
    (r"gptj", _plain(28, 4096, 16, 16, 16384, 50400, tied=False, positions="rotary", parallel=True)),
    (r"bloom(176b)?$", _plain(70, 14336, 112, 112, 57344, 250880)),
    (r"bloom7\.?1?b", _plain(30, 4096, 32, 32, 16384, 250880)),
    (r"falcon7b", _plain(32, 4544, 71, 1, 18176, 65024, positions="rotary", biases="none", parallel=True)),
    (r"falcon40b", _plain(60, 8192, 128, 8, 32768, 65024, positions="rotary", biases="none", parallel=True)),
    (r"falcon180b", _plain(80, 14848, 232, 8, 59392, 65024, positions="rotary", biases="none", parallel=True)),
    (r"starcoder$|starcoder15", _plain(40, 6144, 48, 1, 24576, 49152)),
    (r"mpt7b", _plain(32, 4096, 32, 32, 16384, 50368, biases="none")),
    (r"mpt30b", _plain(48, 7168, 64, 64, 28672, 50368, biases="none")),
    # Brown et al. 2020, table 2.1, and NeMo's configurations of the same names
    (r"gpt3?760m", _plain(24, 1536, 16, 16, 6144, 51200)),
    (r"gpt3?(350m|345m)", _plain(24, 1024, 16, 16, 4096, 51200)),
    (r"gpt3?2\.7b", _plain(32, 2560, 32, 32, 10240, 51200)),
    (r"gpt3?5b", _plain(24, 4096, 32, 32, 16384, 51200)),
    (r"gpt3?20b", _plain(44, 6144, 48, 48, 24576, 51200)),
    (r"gpt3?40b", _plain(48, 8192, 64, 64, 32768, 51200)),
    (r"gpt3?126m", _plain(12, 768, 12, 12, 3072, 51200)),
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

_TABLE = tuple((re.compile(pattern), spec) for pattern, spec in _WRITTEN) + tuple(
    (re.compile(pattern), MODELS[name]) for pattern, name in _PRESETS
)


def known_model(name: str) -> Model | None:
    """Return the sizes of the model that publishers call ``name``, or None.

    >>> known_model("meta-llama/Llama-3.2-1B").layers
    16
    >>> known_model("LLAMA3_70B LoRA").name, known_model("our model") is None
    ('llama3-70b', True)
    """
    squeezed = re.sub(r"[^a-z0-9.]", "", name.lower()[:200])
    found = next((spec for pattern, spec in _TABLE if pattern.search(squeezed)), None)
    if isinstance(found, Transformer):
        return replace(found, window=None, name=found.name if found.name in MODELS else squeezed)
    return found
