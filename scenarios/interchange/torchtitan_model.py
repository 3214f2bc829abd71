"""The model in a torchtitan module, and the run: functions that build the configuration of both, from variables.

torchtitan's own lists of models have fixed sizes, so the module builds the configuration of a scenario's model from the
same parts: the blocks of Llama 3, or those of Qwen3 where heads have norms or a width of their own, or there are
experts. Other models (learned positions, layer norms, gelu, biases, latent attention, shared experts) have no parts
there: the configuration of such a model is the user's.

References
----------
torchtitan 0.3.0: ``torchtitan/models/llama3/__init__.py``, ``.../qwen3/__init__.py`` (how models are built of parts,
their norms and initial weights), ``.../common/config_utils.py``, ``torchtitan/trainer.py`` (``Trainer.Config``),
``torchtitan/components/optimizer`` (``default_adamw``, ``LRSchedulersContainer``),
``torchtitan/hf_datasets/text_datasets.py`` (``c4_test`` is the loader of a local folder).
"""

from typing import Any

from meshwise.scenarios.interchange.entry import Entry, Values
from meshwise.scenarios.interchange.facts import MODEL, Facts, TrainerRequest
from meshwise.scenarios.interchange.lines import ConfigValues
from meshwise.scenarios.interchange.recipe import (
    BETAS,
    CHECKPOINT_EVERY,
    CHECKPOINTS,
    CLIPPING,
    DATA,
    EPSILON,
    ITERATIONS,
    LEARNING_RATE,
    MIN_LEARNING_RATE,
    SCHEDULE,
    TOKENIZER,
    WARMUP,
    WEIGHT_DECAY,
    describe_clipping,
    find_family,
)
from meshwise.simulator.models.experts import Experts

_COUNTS = {
    "LAYERS": "layers",
    "HIDDEN": "hidden",
    "HEADS": "heads",
    "KV_HEADS": "kv_heads",
    "HEAD_WIDTH": "kv_channels",
    "FFN": "ffn",
    "VOCABULARY": "vocab",
    "POSITIONS": "max_positions",
}
_TIED, _HEAD_NORMS = "TIED", "HEAD_NORMS"
_EXPERTS, _TOP_K, _EXPERT_FFN, _BALANCED = "EXPERTS", "TOP_K", "EXPERT_FFN", "BALANCES_BY_BIAS"
MODEL_KEYS = (*_COUNTS, _TIED, _HEAD_NORMS, _EXPERTS, _TOP_K, _EXPERT_FFN, _BALANCED)
"""Variables that state the model; a file has all of them or none."""

FAMILY_KEYS = ("ROTARY_BASE", "NORM_EPSILON", "INITIAL_DEVIATION")
RUN_KEYS = (
    "LEARNING_RATE",
    "MIN_LEARNING_RATE",
    "SCHEDULE",
    "WARMUP",
    "ITERATIONS",
    "WEIGHT_DECAY",
    "BETAS",
    "EPSILON",
    "CHECKPOINTS",
    "CHECKPOINT_EVERY",
    "DATA",
    "TOKENIZER",
)
"""Variables of a family of models and of a run, which no scenario states."""

MAX_NORM = "CLIPPING"
VARIABLES = (*MODEL_KEYS, *FAMILY_KEYS, *RUN_KEYS, MAX_NORM)
"""All variables at the top of a module."""

_UNCLIPPED = 1e38
"""A norm that no gradients have, because torchtitan always clips by one."""

_FIXED = {
    "ffn_kind": "swiglu",
    "positions": "rotary",
    "norm": "rms",
    "biases": "none",
    "dropout": False,
    "parallel_residual": False,
    "window": None,
    "latent": None,
}
"""What every model that the module builds has."""


def has_model(facts: Facts) -> bool:
    """Return whether the module can build the model of a scenario from torchtitan's parts."""
    experts: Experts | None = facts["model.experts"]
    is_plain = experts is None or not (experts.shared or experts.dense_layers or experts.capacity_factor != 1)
    return is_plain and all(facts[f"model.{name}"] == value for name, value in _FIXED.items())


def _say_model(facts: Facts) -> Values:
    if not has_model(facts):
        return {}
    experts: Experts | None = facts["model.experts"]
    values: Values = {key: facts[f"model.{name}"] for key, name in _COUNTS.items()}
    values |= {_TIED: facts["model.tied_embeddings"], _HEAD_NORMS: facts["model.qk_norm"]}
    values |= {_EXPERTS: experts.count if experts else 0, _TOP_K: experts.top_k if experts else 0}
    return values | {
        _EXPERT_FFN: experts.ffn if experts else 0,
        _BALANCED: experts.score_bias if experts else False,
    }


def _read_model(config: ConfigValues) -> Facts:
    stated_keys = [key for key in MODEL_KEYS if key in config]
    if not stated_keys:
        return {}
    facts: Facts = {f"model.{name}": config.count(key) for key, name in _COUNTS.items()}
    facts |= {"model.tied_embeddings": config.flag(_TIED), "model.qk_norm": config.flag(_HEAD_NORMS)}
    count, top_k, ffn = (config.count(key, minimum=0) for key in (_EXPERTS, _TOP_K, _EXPERT_FFN))
    has_bias = config.flag(_BALANCED)
    try:
        experts = Experts(count, top_k, ffn, score_bias=has_bias) if count else None
    except ValueError as error:
        raise config.build_error(_EXPERTS, str(error)) from None
    return facts | {"model.experts": experts} | {f"model.{name}": value for name, value in _FIXED.items()}


def _say_clipping(facts: Facts) -> Values:
    return {MAX_NORM: CLIPPING if facts["training.gradient_clipping"] else _UNCLIPPED}


def _read_clipping(config: ConfigValues) -> Facts:
    if MAX_NORM not in config:
        return {}
    value = config.get(MAX_NORM)
    if type(value) not in (int, float) or not value > 0:
        raise config.build_error(MAX_NORM, "is the largest norm of gradients, a number above 0")
    return {"training.gradient_clipping": value < _UNCLIPPED}


MODEL_ENTRIES = (
    Entry((*MODEL_KEYS, *FAMILY_KEYS), tuple(name for name in MODEL if name != "model.name"), _say_model, _read_model),
    Entry((MAX_NORM,), ("training.gradient_clipping",), _say_clipping, _read_clipping),
    Entry(RUN_KEYS, ()),
)
"""Variables of the module: the model where it can be built, clipping, and what no scenario states."""


def list_variables(values: Values, request: TrainerRequest) -> list[tuple[str, list[tuple[str, Any, str]]]]:
    """Return the groups of variables at the top: a heading, then name, value and comment of each."""
    family = find_family(request.spec)
    clipping = describe_clipping(request.problem.training, "torchtitan", CLIPPING)
    run = {
        "LEARNING_RATE": (LEARNING_RATE, ""),
        "MIN_LEARNING_RATE": (MIN_LEARNING_RATE, ""),
        "SCHEDULE": (SCHEDULE, "or linear, sqrt"),
        "WARMUP": (WARMUP, "steps"),
        "ITERATIONS": (ITERATIONS, "steps"),
        MAX_NORM: (values[MAX_NORM], clipping),
        "WEIGHT_DECAY": (WEIGHT_DECAY, ""),
        "BETAS": (BETAS, ""),
        "EPSILON": (EPSILON, ""),
        "CHECKPOINTS": (CHECKPOINTS, "a folder in ./outputs"),
        "CHECKPOINT_EVERY": (CHECKPOINT_EVERY, "steps"),
        "DATA": (DATA, "a folder of JSON lines with a field `text`"),
        "TOKENIZER": (TOKENIZER, "a folder with tokenizer.json"),
    }
    groups = [("Yours to set.", [(name, *pair) for name, pair in run.items()])]
    if _TIED not in values:
        return groups
    family_values = (family.rotary_base, family.norm_epsilon, family.deviation)
    groups.append(("The model, of the scenario.", [(key, values[key], "") for key in MODEL_KEYS]))
    comment = f"Published defaults, which the scenario does not state ({family.source})."
    return [*groups, (comment, [(key, value, "") for key, value in zip(FAMILY_KEYS, family_values, strict=True)])]


RUN_CODE = '''

def set_run(config: Trainer.Config) -> Trainer.Config:
    """Set what the variables above say of the run."""
    config.optimizer = default_adamw(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=BETAS, eps=EPSILON)
    config.lr_scheduler = LRSchedulersContainer.Config(
        warmup_steps=WARMUP, decay_type=SCHEDULE, min_lr_factor=MIN_LEARNING_RATE / LEARNING_RATE
    )
    config.training.steps = ITERATIONS
    config.training.max_norm = CLIPPING
    config.checkpoint = CheckpointManager.Config(enable=True, folder=CHECKPOINTS, interval=CHECKPOINT_EVERY)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=DATA)
    config.hf_assets_path = TOKENIZER
    return config
'''
RUN_IMPORTS = (
    "from torchtitan.components.checkpointer import CheckpointManager",
    "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
    "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
)

MODEL_CODE = '''

def build_model() -> ModelSpec:
    """Return the model of the variables above, from torchtitan's own blocks."""
    normal, ones = partial(nn.init.normal_, std=INITIAL_DEVIATION), {"weight": nn.init.ones_}
    scaled = partial(nn.init.normal_, std=INITIAL_DEVIATION / (2 * LAYERS) ** 0.5)
    is_qwen = HEAD_NORMS or EXPERTS > 0 or HEAD_WIDTH * HEADS != HIDDEN

    def norm(width):
        return RMSNorm.Config(normalized_shape=width, eps=NORM_EPSILON, param_init=ones)

    def attention():
        rope = CosSinRoPE if is_qwen else ComplexRoPE
        return make_gqa_config(
            dim=HIDDEN,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            head_dim=HEAD_WIDTH,
            wqkv_param_init={"weight": normal},
            wo_param_init={"weight": scaled},
            inner_attention=FlexAttention.Config(),
            fuse_qkv=True,
            rope=rope.Config(dim=HEAD_WIDTH, max_seq_len=POSITIONS, theta=ROTARY_BASE),
            qk_norm=norm(HEAD_WIDTH) if HEAD_NORMS else None,
        )

    def feed_forward():
        if EXPERTS == 0:
            w1, others = {"weight": normal}, {"weight": scaled}
            return {
                "feed_forward": make_ffn_config(
                    dim=HIDDEN, hidden_dim=FFN, w1_param_init=w1, w2w3_param_init=others
                )
            }
        router = make_router_config(
            dim=HIDDEN,
            num_experts=EXPERTS,
            gate_param_init={"weight": normal},
            top_k=TOP_K,
            score_func="softmax",
            route_norm=True,
        )
        experts = make_routed_experts_config(
            dim=HIDDEN,
            hidden_dim=EXPERT_FFN,
            num_experts=EXPERTS,
            top_k=TOP_K,
            param_init={"w1_EFD": normal, "w2_EDF": scaled, "w3_EFD": normal},
            comm_backend="standard",
        )
        coefficient = 1e-3 if BALANCES_BY_BIAS else None
        return {
            "moe": make_moe_config(
                num_experts=EXPERTS, router=router, routed_experts=experts, load_balance_coeff=coefficient
            )
        }

    block, model = (Qwen3TransformerBlock, Qwen3Model) if is_qwen else (Llama3TransformerBlock, Llama3Model)
    config = model.Config(
        dim=HIDDEN,
        vocab_size=VOCABULARY,
        enable_weight_tying=TIED,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY,
            embedding_dim=HIDDEN,
            param_init={"weight": skip_param_init if TIED else normal},
        ),
        norm=norm(HIDDEN),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCABULARY, param_init={"weight": normal}),
        layers=[
            block.Config(attention_norm=norm(HIDDEN), ffn_norm=norm(HIDDEN), attention=attention(), **feed_forward())
            for _ in range(LAYERS)
        ],
    )
    return ModelSpec(
        name="qwen3" if is_qwen else "llama3",
        flavor="meshwise",
        model=config,
        parallelize_fn=parallelize_qwen3 if is_qwen else parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook if BALANCES_BY_BIAS else None,
        state_dict_adapter=Qwen3StateDictAdapter if is_qwen else Llama3StateDictAdapter,
    )


def train() -> Trainer.Config:
    """Return the configuration of the whole run."""
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY))
    return laid_out(set_run(Trainer.Config(model_spec=build_model(), loss=loss)))
'''
STANDARD_IMPORT = "from functools import partial"
MODEL_IMPORTS = (
    "from torch import nn",
    "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss",
    "from torchtitan.components.optimizer import register_moe_load_balancing_hook",
    "from torchtitan.distributed.pipeline_parallel import pipeline_llm",
    "from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm",
    "from torchtitan.models.common.attention import FlexAttention",
    "from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config, make_moe_config",
    "from torchtitan.models.common.config_utils import make_routed_experts_config, make_router_config",
    "from torchtitan.models.common.param_init import skip_param_init",
    "from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock",
    "from torchtitan.models.llama3.parallelize import parallelize_llama",
    "from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter",
    "from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock",
    "from torchtitan.models.qwen3.parallelize import parallelize_qwen3",
    "from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter",
    "from torchtitan.protocols.model_spec import ModelSpec",
)
