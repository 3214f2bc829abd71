"""A model from the parsed ``config.json`` of a Hugging Face repository, without the library.

Field names, and the defaults of fields that a file leaves out, are those of the configuration classes of transformers
and diffusers. The file is not trusted: a missing or absurd field, and one that would make a network other than the
families here, raises `ConfigError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
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
MAX_QUOTED = 60
"""Most characters of a foreign value in a message."""
_NO_DEFAULT = -1


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
        return fields.read_choice("_class_name", _DIFFUSERS)(fields)
    reader = fields.read_choice("model_type", _FAMILIES)
    try:
        return reader(fields)
    except ConfigError:
        raise
    except ValueError as error:
        blamed_field = str(error).split()[0].rstrip(":")
        raise ConfigError(_CONFIG_NAMES.get(blamed_field, "model_type"), str(error)) from None


_CONFIG_NAMES = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "patch": "patch_size",
    "experts": "first_k_dense_replace",
    "top_k": "num_experts_per_tok",
}
"""Configuration fields by the names that constructors use in their errors."""


def _quote_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = ascii(value)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


class _Fields:
    """Checked access to the fields of a configuration."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = config

    def read_count(self, field: str, default: int = _NO_DEFAULT, maximum: int = MAX_WIDTH, minimum: int = 1) -> int:
        """Return a whole number; ``default`` where it is missing or null."""
        value = self.config.get(field)
        if value is None and default != _NO_DEFAULT:
            return default
        # JSON's true is an int to Python
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ConfigError(field, f"holds a whole number from {minimum} to {maximum}, met {_quote_value(value)}")
        return value

    def read_layers(self, field: str = "num_hidden_layers", default: int = _NO_DEFAULT) -> int:
        """Return a number of layers."""
        return self.read_count(field, default, MAX_LAYERS)

    def read_optional(self, field: str) -> int | None:
        """Return a whole number, or None where it is missing or null."""
        return self.read_count(field) if self.config.get(field) is not None else None

    def read_flag(self, field: str, default: bool) -> bool:
        """Return true or false."""
        value = self.config.get(field, default)
        if not isinstance(value, bool):
            raise ConfigError(field, f"holds true or false, met {_quote_value(value)}")
        return value

    def has_dropout(self, default: float, *fields: str) -> bool:
        """Return whether any of the probabilities in ``fields`` is more than 0."""
        return max(self._read_probability(field, default) for field in fields) > 0

    def _read_probability(self, field: str, default: float) -> float:
        value = self.config.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(field, f"holds a number from 0 to below 1, met {_quote_value(value)}")
        return float(value)

    def read_counts(self, field: str, maximum: int = MAX_WIDTH) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        values = self._read_list(field, f"whole numbers from 1 to {maximum}")
        if not all(type(value) is int and 1 <= value <= maximum for value in values):
            raise ConfigError(field, f"holds a list of whole numbers from 1 to {maximum}, met another value in it")
        return tuple(value for value in values if isinstance(value, int))

    def read_words(self, field: str, table: Mapping[str, T]) -> tuple[T, ...]:
        """Return a list of words, each replaced by its meaning in ``table``."""
        known_words = ", ".join(table)
        values = self._read_list(field, f"words out of {known_words}")
        for value in values:
            if not isinstance(value, str) or value not in table:
                raise ConfigError(field, f"holds a list of words out of {known_words}, met {_quote_value(value)}")
        return tuple(table[str(value)] for value in values)

    def _read_list(self, field: str, content: str) -> Sequence[object]:
        values = self.config.get(field)
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_LEVELS:
            raise ConfigError(field, f"holds a list of 1 to {MAX_LEVELS} {content}, met {_quote_value(values)}")
        return values

    def read_choice(self, field: str, table: Mapping[str, T], default: str | None = None) -> T:
        """Return the meaning of the word in ``field``; the error of an unknown one lists the known, nearest first."""
        value = self.config.get(field)
        value = default if value is None else value
        if not isinstance(value, str) or value not in table:
            nearest = (
                get_close_matches(str(value)[:MAX_QUOTED], table, n=3, cutoff=0.4) if isinstance(value, str) else []
            )
            known_words = [*nearest, *(name for name in table if name not in nearest)]
            raise ConfigError(field, f"holds one of {', '.join(known_words)}, met {_quote_value(value)}")
        return table[value]

    def require_values(self, **required: object) -> None:
        """Check fields that may have one value only, which is also their default."""
        for field, value in required.items():
            actual = self.config.get(field, value)
            if actual != value or isinstance(actual, bool) != isinstance(value, bool):
                allowed = "an empty list" if value == [] else _quote_value(value)
                raise ConfigError(field, f"holds {allowed} in the models known here, met {_quote_value(actual)}")

    def count_labels(self) -> int:
        """Return the number of classes: two where a configuration states none."""
        names = self.config.get("id2label")
        return self.read_count("num_labels", len(names) if isinstance(names, Mapping) and names else 2)


_GELU = dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"), "gelu")
_SILU = {"silu": "swiglu", "swish": "swiglu"}
_GATED_GELU = dict.fromkeys(("gelu", "gelu_pytorch_tanh"), "geglu")


def _read_gpt2(config: _Fields) -> Transformer:
    hidden, heads = config.read_count("n_embd"), config.read_count("n_head")
    config.require_values(add_cross_attention=False)
    return Transformer(
        layers=config.read_layers("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=config.read_count("n_inner", 4 * hidden),
        vocab=config.read_count("vocab_size"),
        ffn_kind=config.read_choice("activation_function", _GELU, "gelu_new"),
        tied_embeddings=config.read_flag("tie_word_embeddings", True),
        dropout=config.has_dropout(0.1, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        max_positions=config.read_count("n_positions"),
        name="gpt2",
    )


def _read_gpt_neox(config: _Fields) -> Transformer:
    heads = config.read_count("num_attention_heads")
    config.require_values(attention_bias=True)
    return Transformer(
        layers=config.read_layers(),
        hidden=config.read_count("hidden_size"),
        heads=heads,
        kv_heads=heads,
        ffn=config.read_count("intermediate_size"),
        vocab=config.read_count("vocab_size"),
        ffn_kind=config.read_choice("hidden_act", _GELU, "gelu"),
        tied_embeddings=config.read_flag("tie_word_embeddings", False),
        dropout=config.has_dropout(0.0, "hidden_dropout", "attention_dropout"),
        positions="rotary",
        parallel_residual=config.read_flag("use_parallel_residual", True),
        name="gpt_neox",
    )


def _read_experts(config: _Fields, count: str, ffn: str) -> Experts:
    return Experts(config.read_count(count), config.read_count("num_experts_per_tok"), config.read_count(ffn))


def _read_deepseek_experts(config: _Fields, *, score_bias: bool) -> Experts:
    return replace(
        _read_experts(config, "n_routed_experts", "moe_intermediate_size"),
        shared=config.read_count("n_shared_experts", 0, minimum=0),
        dense_layers=config.read_count("first_k_dense_replace", 0, MAX_LAYERS, minimum=0),
        score_bias=score_bias,
    )


def _read_latent_attention(config: _Fields) -> LatentAttention:
    return LatentAttention(
        kv_rank=config.read_count("kv_lora_rank"),
        nope_dim=config.read_count("qk_nope_head_dim"),
        rope_dim=config.read_count("qk_rope_head_dim"),
        value_dim=config.read_count("v_head_dim"),
        q_rank=config.read_optional("q_lora_rank"),
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """What the decoders of a family are where their config says nothing, and what no config says of them.

    They have root-mean-square norms, rotary positions and gated feed-forward layers.

    Parameters
    ----------
    only
        Fields that may have one value only, which is also their default.
    has_gelu
        Whether the activation is GELU, not SiLU; ``hidden_activation``, another field for its name, is checked too.
    tied
        Whether the output weight is the embedding table.
    head_dim
        Width of a head; ``None`` where heads share the hidden size.
    every_head
        Whether leaving ``num_key_value_heads`` out means one for each head.
    windows
        Whether configs state a sliding window; ``window`` where they leave it out, but an explicit null means none.
    experts
        Reads the mixture of experts.
    """

    only: Mapping[str, object]
    has_gelu: bool = False
    tied: bool = False
    head_dim: int | None = None
    every_head: bool = False
    biases: str | None = None
    qk_norm: bool = False
    windows: bool = False
    window: int | None = None
    experts: Callable[[_Fields], Experts] | None = None
    has_latent_attention: bool = False


_NO_BIAS = {"attention_bias": False}
_NO_WINDOW = {"use_sliding_window": False}
_DEEPSEEK = _Family(_NO_BIAS | {"moe_layer_freq": 1}, has_latent_attention=True)
_DECODERS = {
    "llama": _Family(_NO_BIAS | {"mlp_bias": False}, every_head=True),
    # the default of transformers
    "mistral": _Family({}, windows=True, window=4096),
    "mixtral": _Family(
        {}, windows=True, experts=partial(_read_experts, count="num_local_experts", ffn="intermediate_size")
    ),
    "qwen2": _Family(_NO_WINDOW, biases="qkv"),
    "qwen3": _Family(_NO_WINDOW | _NO_BIAS, head_dim=128, qk_norm=True),
    "qwen3_moe": _Family(
        _NO_WINDOW | _NO_BIAS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        head_dim=128,
        qk_norm=True,
        experts=partial(_read_experts, count="num_experts", ffn="moe_intermediate_size"),
    ),
    "gemma": _Family(_NO_BIAS, has_gelu=True, tied=True, head_dim=256),
    "deepseek_v2": replace(_DEEPSEEK, experts=partial(_read_deepseek_experts, score_bias=False)),
    "deepseek_v3": replace(_DEEPSEEK, experts=partial(_read_deepseek_experts, score_bias=True)),
}


def _read_decoder(config: _Fields, name: str) -> Transformer:
    family = _DECODERS[name]
    config.require_values(**family.only)
    activations = _GATED_GELU if family.has_gelu else _SILU
    if family.has_gelu:
        config.read_choice("hidden_activation", _GATED_GELU, "gelu_pytorch_tanh")
    latent = _read_latent_attention(config) if family.has_latent_attention else None
    experts = family.experts(config) if family.experts else None
    window = family.window
    if family.windows and "sliding_window" in config.config:
        window = config.read_optional("sliding_window")
    heads = config.read_count("num_attention_heads")
    channels = None if latent else config.read_optional("head_dim") or family.head_dim
    return Transformer(
        layers=config.read_layers(),
        hidden=config.read_count("hidden_size"),
        heads=heads,
        kv_heads=config.read_count("num_key_value_heads", heads if family.every_head else _NO_DEFAULT),
        ffn=config.read_count("intermediate_size"),
        vocab=config.read_count("vocab_size"),
        ffn_kind=config.read_choice("hidden_act", activations, next(iter(activations))),
        tied_embeddings=config.read_flag("tie_word_embeddings", family.tied),
        dropout=config.has_dropout(0.0, "attention_dropout"),
        positions="rotary",
        kv_channels=channels,
        biases=family.biases,
        qk_norm=family.qk_norm,
        window=window,
        experts=experts,
        latent=latent,
        name=name,
    )


def _read_bert(config: _Fields) -> Bert:
    config.read_choice("hidden_act", _GELU | {"relu": "relu"}, "gelu")
    config.require_values(is_decoder=False, tie_word_embeddings=True)
    return Bert(
        layers=config.read_layers(),
        hidden=config.read_count("hidden_size"),
        heads=config.read_count("num_attention_heads"),
        ffn=config.read_count("intermediate_size"),
        vocab=config.read_count("vocab_size"),
        max_positions=config.read_count("max_position_embeddings", 512),
        types=config.read_count("type_vocab_size", 2),
        dropout=config.has_dropout(0.1, "hidden_dropout_prob", "attention_probs_dropout_prob"),
        name="bert",
    )


def _read_t5(config: _Fields) -> T5:
    kinds = {"relu": "relu", "gated-gelu": "geglu", "gated-silu": "swiglu"}
    layers = config.read_layers("num_layers")
    decoder = config.read_layers("num_decoder_layers", layers)
    return T5(
        layers=layers,
        hidden=config.read_count("d_model"),
        heads=config.read_count("num_heads"),
        head_dim=config.read_count("d_kv"),
        ffn=config.read_count("d_ff"),
        vocab=config.read_count("vocab_size"),
        decoder_layers=None if decoder == layers else decoder,
        buckets=config.read_count("relative_attention_num_buckets", 32),
        ffn_kind=config.read_choice("feed_forward_proj", kinds, "relu"),
        tied_embeddings=config.read_flag("tie_word_embeddings", True),
        dropout=config.has_dropout(0.1, "dropout_rate"),
        name="t5",
    )


def _read_vit(config: _Fields) -> VisionTransformer:
    config.read_choice("hidden_act", _GELU, "gelu")
    config.require_values(qkv_bias=True)
    return VisionTransformer(
        layers=config.read_layers(),
        hidden=config.read_count("hidden_size"),
        heads=config.read_count("num_attention_heads"),
        ffn=config.read_count("intermediate_size"),
        patch=config.read_count("patch_size", 16),
        image=config.read_count("image_size", 224, 100_000),
        channels=config.read_count("num_channels", 3),
        classes=config.count_labels(),
        dropout=config.has_dropout(0.0, "hidden_dropout_prob", "attention_probs_dropout_prob"),
        name="vit",
    )


def _read_resnet(config: _Fields) -> ResNet:
    config.require_values(layer_type="bottleneck", downsample_in_first_stage=False, downsample_in_bottleneck=False)
    depths, stem = config.read_counts("depths", MAX_LAYERS), config.read_count("embedding_size", 64)
    widths = config.read_counts("hidden_sizes")
    expected = tuple(EXPANSION * stem * 2**stage for stage in range(len(depths)))
    if widths != expected:
        raise ConfigError("hidden_sizes", f"holds {list(expected)} for these depths, met {list(widths)}")
    channels = config.read_count("num_channels", 3)
    return ResNet(depths=depths, stem=stem, channels=channels, classes=config.count_labels(), name="resnet")


def _read_unet(config: _Fields) -> UNet:
    config.require_values(transformer_layers_per_block=1, use_linear_projection=False, dual_cross_attention=False)
    config.require_values(
        num_attention_heads=None, addition_embed_type=None, class_embed_type=None, only_cross_attention=False
    )
    channels = config.read_count("in_channels")
    config.require_values(out_channels=channels, mid_block_type="UNetMidBlock2DCrossAttn")
    down_attends = config.read_words("down_block_types", {"CrossAttnDownBlock2D": True, "DownBlock2D": False})
    up_attends = config.read_words("up_block_types", {"CrossAttnUpBlock2D": True, "UpBlock2D": False})
    if up_attends != down_attends[::-1]:
        raise ConfigError("up_block_types", "holds down_block_types in reverse order, met another order")
    try:
        return UNet(
            widths=config.read_counts("block_out_channels"),
            attends=down_attends,
            depth=config.read_count("layers_per_block", maximum=MAX_LEVELS),
            heads=config.read_count("attention_head_dim", 8),
            image=config.read_count("sample_size", maximum=100_000),
            text=CLIP_TOKENS,
            text_width=config.read_count("cross_attention_dim"),
            channels=channels,
            name="unet",
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("block_out_channels", str(error)) from None


_FAMILIES: dict[str, Callable[[_Fields], Model]] = {
    "gpt2": _read_gpt2,
    "gpt_neox": _read_gpt_neox,
    **{name: partial(_read_decoder, name=name) for name in _DECODERS},
    "bert": _read_bert,
    "t5": _read_t5,
    "vit": _read_vit,
    "resnet": _read_resnet,
}
_DIFFUSERS: dict[str, Callable[[_Fields], Model]] = {"UNet2DConditionModel": _read_unet}
