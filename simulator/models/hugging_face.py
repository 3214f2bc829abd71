"""A model from the parsed ``config.json`` of a Hugging Face repository, without the library.

Field names, and the defaults of fields that a file leaves out, are those of the configuration classes of transformers
and diffusers. The file is not trusted: a missing or absurd field, and one that would make a network other than the
families here, raises `ConfigError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.models.unet import UNet
from meshwise.simulator.models.vision import EXPANSION, ResNet, VisionTransformer

T = TypeVar("T")

MAX_LAYERS = 10_000
MAX_WIDTH = 10_000_000
MAX_LEVELS = 16
"""Stages of a vision network at most."""
CLIP_TOKENS = 77
"""Tokens of the text that Stable Diffusion reads (Radford et al. 2021, section 2.4: context 76 and the end)."""
SHOWN = 60
"""Most characters of a foreign value in a message."""
_REQUIRED = -1


class ConfigError(ValueError):
    """A wrong ``field`` of a configuration; ``message`` says what it must hold and what was found."""

    def __init__(self, field: str, message: str) -> None:
        self.field, self.message = field, message
        super().__init__(f"{field}: {message}")


def spec_from_config(config: Mapping[str, object]) -> Model:
    """Return the model that a parsed ``config.json`` describes.

    Raises
    ------
    ConfigError
        Where a field is missing or absurd, or the model is of no known family.

    >>> spec_from_config({"model_type": "resnet", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]})
    ResNet(depths=(3, 4, 6, 3), stem=64, image=224, channels=3, classes=2, name='resnet')
    """
    fields = _Fields(config)
    if "model_type" not in config and "_class_name" in config:
        return fields.choice("_class_name", _DIFFUSERS)(fields)
    reader = fields.choice("model_type", _FAMILIES)
    try:
        return reader(fields)
    except ConfigError:
        raise
    except ValueError as error:
        word = str(error).split()[0].rstrip(":")
        raise ConfigError(_CONFIG_NAMES.get(word, "model_type"), str(error)) from None


_CONFIG_NAMES = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "patch": "patch_size",
    "experts": "first_k_dense_replace",
    "top_k": "num_experts_per_tok",
}
"""Configuration fields by the names that constructors use in their errors."""


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = ascii(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


class _Fields:
    """Checked access to the fields of a configuration."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = config

    def count(self, field: str, default: int = _REQUIRED, most: int = MAX_WIDTH, least: int = 1) -> int:
        """Return a whole number; ``default`` where it is missing or null."""
        value = self.config.get(field)
        if value is None and default != _REQUIRED:
            return default
        # JSON's true is an int to Python
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(field, f"holds a whole number from {least} to {most}, met {_shown(value)}")
        return value

    def layers(self, field: str = "num_hidden_layers", default: int = _REQUIRED) -> int:
        """Return a number of layers."""
        return self.count(field, default, MAX_LAYERS)

    def optional(self, field: str) -> int | None:
        """Return a whole number, or None where it is missing or null."""
        return self.count(field) if self.config.get(field) is not None else None

    def flag(self, field: str, default: bool) -> bool:
        """Return true or false."""
        value = self.config.get(field, default)
        if not isinstance(value, bool):
            raise ConfigError(field, f"holds true or false, met {_shown(value)}")
        return value

    def drops(self, default: float, *fields: str) -> bool:
        """Return whether any of the probabilities in ``fields`` is more than 0."""
        return max(self._probability(field, default) for field in fields) > 0

    def _probability(self, field: str, default: float) -> float:
        value = self.config.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(field, f"holds a number from 0 to below 1, met {_shown(value)}")
        return float(value)

    def counts(self, field: str, most: int = MAX_WIDTH) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        values = self._list(field, f"whole numbers from 1 to {most}")
        if not all(type(value) is int and 1 <= value <= most for value in values):
            raise ConfigError(field, f"holds a list of whole numbers from 1 to {most}, met another value in it")
        return tuple(value for value in values if isinstance(value, int))

    def words(self, field: str, table: Mapping[str, T]) -> tuple[T, ...]:
        """Return a list of words, each replaced by its meaning in ``table``."""
        known = ", ".join(table)
        values = self._list(field, f"words out of {known}")
        for value in values:
            if not isinstance(value, str) or value not in table:
                raise ConfigError(field, f"holds a list of words out of {known}, met {_shown(value)}")
        return tuple(table[str(value)] for value in values)

    def _list(self, field: str, what: str) -> Sequence[object]:
        values = self.config.get(field)
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_LEVELS:
            raise ConfigError(field, f"holds a list of 1 to {MAX_LEVELS} {what}, met {_shown(values)}")
        return values

    def choice(self, field: str, table: Mapping[str, T], default: str | None = None) -> T:
        """Return the meaning of the word in ``field``; the error of an unknown one lists the known, nearest first."""
        value = self.config.get(field)
        value = default if value is None else value
        if not isinstance(value, str) or value not in table:
            near = get_close_matches(str(value)[:SHOWN], table, n=3, cutoff=0.4) if isinstance(value, str) else []
            known = [*near, *(name for name in table if name not in near)]
            raise ConfigError(field, f"holds one of {', '.join(known)}, met {_shown(value)}")
        return table[value]

    def only(self, **wanted: object) -> None:
        """Check fields that may have one value only, which is also their default."""
        for field, value in wanted.items():
            met = self.config.get(field, value)
            if met != value or isinstance(met, bool) != isinstance(value, bool):
                raise ConfigError(field, f"holds {_shown_value(value)} in the models known here, met {_shown(met)}")

    def labels(self) -> int:
        """Return the number of classes: two where a configuration states none."""
        names = self.config.get("id2label")
        return self.count("num_labels", len(names) if isinstance(names, Mapping) and names else 2)


def _shown_value(value: object) -> str:
    return "an empty list" if value == [] else _shown(value)


_GELU = dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"), "gelu")
_SILU = {"silu": "swiglu", "swish": "swiglu"}
_GATED_GELU = dict.fromkeys(("gelu", "gelu_pytorch_tanh"), "geglu")


def _gpt2(config: _Fields) -> Transformer:
    hidden, heads = config.count("n_embd"), config.count("n_head")
    config.only(add_cross_attention=False)
    return Transformer(
        layers=config.layers("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=config.count("n_inner", 4 * hidden),
        vocab=config.count("vocab_size"),
        ffn_kind=config.choice("activation_function", _GELU, "gelu_new"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        dropout=config.drops(0.1, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        max_positions=config.count("n_positions"),
        name="gpt2",
    )


def _gpt_neox(config: _Fields) -> Transformer:
    heads = config.count("num_attention_heads")
    config.only(attention_bias=True)
    return Transformer(
        layers=config.layers(),
        hidden=config.count("hidden_size"),
        heads=heads,
        kv_heads=heads,
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        ffn_kind=config.choice("hidden_act", _GELU, "gelu"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        dropout=config.drops(0.0, "hidden_dropout", "attention_dropout"),
        positions="rotary",
        parallel_residual=config.flag("use_parallel_residual", True),
        name="gpt_neox",
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """What the decoders of a family are where their config says nothing, and what no config says of them.

    Parameters
    ----------
    activations
        Kinds of feed-forward layers by the word for their activation; the first is taken where none is said.
    tied
        Whether the output weight is the embedding table.
    head_dim
        Width of a head; ``None`` where heads share the hidden size.
    every_head
        Whether leaving ``num_key_value_heads`` out means one for each head.
    """

    name: str
    activations: Mapping[str, str]
    tied: bool = False
    head_dim: int | None = None
    every_head: bool = False
    biases: str | None = None
    qk_norm: bool = False


def _decoder(
    config: _Fields,
    family: _Family,
    *,
    window: int | None = None,
    experts: Experts | None = None,
    latent: LatentAttention | None = None,
) -> Transformer:
    """Return a decoder with root-mean-square norms, rotary positions and gated feed-forward layers."""
    heads = config.count("num_attention_heads")
    channels = None if latent else config.optional("head_dim") or family.head_dim
    return Transformer(
        layers=config.layers(),
        hidden=config.count("hidden_size"),
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads if family.every_head else _REQUIRED),
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        ffn_kind=config.choice("hidden_act", family.activations, next(iter(family.activations))),
        tied_embeddings=config.flag("tie_word_embeddings", family.tied),
        dropout=config.drops(0.0, "attention_dropout"),
        positions="rotary",
        kv_channels=channels,
        biases=family.biases,
        qk_norm=family.qk_norm,
        window=window,
        experts=experts,
        latent=latent,
        name=family.name,
    )


def _llama(config: _Fields) -> Transformer:
    config.only(attention_bias=False, mlp_bias=False)
    return _decoder(config, _Family("llama", _SILU, every_head=True))


def _mistral(config: _Fields) -> Transformer:
    # transformers' default is 4096, but an explicit null means no window
    stated = "sliding_window" in config.config
    return _decoder(config, _Family("mistral", _SILU), window=config.optional("sliding_window") if stated else 4096)


def _mixtral(config: _Fields) -> Transformer:
    experts = Experts(
        config.count("num_local_experts"), config.count("num_experts_per_tok"), config.count("intermediate_size")
    )
    return _decoder(config, _Family("mixtral", _SILU), window=config.optional("sliding_window"), experts=experts)


def _qwen2(config: _Fields) -> Transformer:
    config.only(use_sliding_window=False)
    return _decoder(config, _Family("qwen2", _SILU, biases="qkv"))


def _qwen3(config: _Fields) -> Transformer:
    config.only(use_sliding_window=False, attention_bias=False)
    return _decoder(config, _Family("qwen3", _SILU, head_dim=128, qk_norm=True))


def _qwen3_moe(config: _Fields) -> Transformer:
    config.only(use_sliding_window=False, attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[])
    count, top_k = config.count("num_experts"), config.count("num_experts_per_tok")
    experts = Experts(count, top_k, config.count("moe_intermediate_size"))
    return _decoder(config, _Family("qwen3_moe", _SILU, head_dim=128, qk_norm=True), experts=experts)


def _gemma(config: _Fields) -> Transformer:
    config.only(attention_bias=False)
    config.choice("hidden_activation", _GATED_GELU, "gelu_pytorch_tanh")
    return _decoder(config, _Family("gemma", _GATED_GELU, tied=True, head_dim=256))


def _deepseek(config: _Fields, name: str, *, score_bias: bool) -> Transformer:
    config.only(attention_bias=False, moe_layer_freq=1)
    latent = LatentAttention(
        kv_rank=config.count("kv_lora_rank"),
        nope_dim=config.count("qk_nope_head_dim"),
        rope_dim=config.count("qk_rope_head_dim"),
        value_dim=config.count("v_head_dim"),
        q_rank=config.optional("q_lora_rank"),
    )
    experts = Experts(
        config.count("n_routed_experts"),
        config.count("num_experts_per_tok"),
        config.count("moe_intermediate_size"),
        shared=config.count("n_shared_experts", 0, least=0),
        dense_layers=config.count("first_k_dense_replace", 0, MAX_LAYERS, least=0),
        score_bias=score_bias,
    )
    return _decoder(config, _Family(name, _SILU), experts=experts, latent=latent)


def _deepseek_v2(config: _Fields) -> Transformer:
    return _deepseek(config, "deepseek_v2", score_bias=False)


def _deepseek_v3(config: _Fields) -> Transformer:
    return _deepseek(config, "deepseek_v3", score_bias=True)


def _bert(config: _Fields) -> Bert:
    config.choice("hidden_act", _GELU | {"relu": "relu"}, "gelu")
    config.only(is_decoder=False, tie_word_embeddings=True)
    return Bert(
        layers=config.layers(),
        hidden=config.count("hidden_size"),
        heads=config.count("num_attention_heads"),
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        max_positions=config.count("max_position_embeddings", 512),
        types=config.count("type_vocab_size", 2),
        dropout=config.drops(0.1, "hidden_dropout_prob", "attention_probs_dropout_prob"),
        name="bert",
    )


def _t5(config: _Fields) -> T5:
    kinds = {"relu": "relu", "gated-gelu": "geglu", "gated-silu": "swiglu"}
    layers = config.layers("num_layers")
    decoder = config.layers("num_decoder_layers", layers)
    return T5(
        layers=layers,
        hidden=config.count("d_model"),
        heads=config.count("num_heads"),
        head_dim=config.count("d_kv"),
        ffn=config.count("d_ff"),
        vocab=config.count("vocab_size"),
        decoder_layers=None if decoder == layers else decoder,
        buckets=config.count("relative_attention_num_buckets", 32),
        ffn_kind=config.choice("feed_forward_proj", kinds, "relu"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        dropout=config.drops(0.1, "dropout_rate"),
        name="t5",
    )


def _vit(config: _Fields) -> VisionTransformer:
    config.choice("hidden_act", _GELU, "gelu")
    config.only(qkv_bias=True)
    return VisionTransformer(
        layers=config.layers(),
        hidden=config.count("hidden_size"),
        heads=config.count("num_attention_heads"),
        ffn=config.count("intermediate_size"),
        patch=config.count("patch_size", 16),
        image=config.count("image_size", 224, 100_000),
        channels=config.count("num_channels", 3),
        classes=config.labels(),
        dropout=config.drops(0.0, "hidden_dropout_prob", "attention_probs_dropout_prob"),
        name="vit",
    )


def _resnet(config: _Fields) -> ResNet:
    config.only(layer_type="bottleneck", downsample_in_first_stage=False, downsample_in_bottleneck=False)
    depths, stem = config.counts("depths", MAX_LAYERS), config.count("embedding_size", 64)
    widths = config.counts("hidden_sizes")
    expected = tuple(EXPANSION * stem * 2**stage for stage in range(len(depths)))
    if widths != expected:
        raise ConfigError("hidden_sizes", f"holds {list(expected)} for these depths, met {list(widths)}")
    channels = config.count("num_channels", 3)
    return ResNet(depths=depths, stem=stem, channels=channels, classes=config.labels(), name="resnet")


def _unet(config: _Fields) -> UNet:
    config.only(transformer_layers_per_block=1, use_linear_projection=False, dual_cross_attention=False)
    config.only(num_attention_heads=None, addition_embed_type=None, class_embed_type=None, only_cross_attention=False)
    channels = config.count("in_channels")
    config.only(out_channels=channels, mid_block_type="UNetMidBlock2DCrossAttn")
    attends = config.words("down_block_types", {"CrossAttnDownBlock2D": True, "DownBlock2D": False})
    up = config.words("up_block_types", {"CrossAttnUpBlock2D": True, "UpBlock2D": False})
    if up != attends[::-1]:
        raise ConfigError("up_block_types", "holds down_block_types in reverse order, met another order")
    try:
        return UNet(
            widths=config.counts("block_out_channels"),
            attends=attends,
            depth=config.count("layers_per_block", most=MAX_LEVELS),
            heads=config.count("attention_head_dim", 8),
            image=config.count("sample_size", most=100_000),
            text=CLIP_TOKENS,
            text_width=config.count("cross_attention_dim"),
            channels=channels,
            name="unet",
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("block_out_channels", str(error)) from None


_FAMILIES: dict[str, Callable[[_Fields], Model]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
}
_DIFFUSERS: dict[str, Callable[[_Fields], Model]] = {"UNet2DConditionModel": _unet}
