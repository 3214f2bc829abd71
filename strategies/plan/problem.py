"""The problem of a search: a network, a machine and a training step.

`Training` has the batch, precision and optimizer, and the bytes that they keep per parameter.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.casts import DELAYED_SCALING, SCALINGS, TENSOR_SCALING
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.composition import COMPOSITIONS
from meshwise.simulator.operator_graph import ITEMSIZE, OperatorGraph
from meshwise.strategies.plan.framework import ENTRIES, FRAMEWORKS, Framework

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
OPTIMIZERS = {"adamw": 2, "sgd": 1, "lion": 1, "adafactor": 0}
"""State tensors per parameter tensor: AdamW keeps two moments, SGD and Lion (Chen et al. 2023, "Symbolic discovery of
optimization algorithms") one momentum; Adafactor keeps only what `Training.factored_bytes` counts."""

GRADIENT_PRECISIONS = ("fp32", "same")
"""Precision in which gradients are accumulated and reduced: fp32, or the same as the parameters."""

STATE_PRECISIONS = ("fp32", "bf16", "same", "int8")
"""Precision of an optimizer's moments. ``same`` is that of the parameters, which have no main copy then, and gradients
as precise where nothing else is stated: an optimizer of torch on 16-bit weights (``torch/optim/adam.py``,
``zeros_like(p)``). ``bf16`` is 16 bits beside main weights in fp32 (Megatron-LM, ``--exp-avg-dtype``). ``int8`` is
quantised in blocks (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", section 2), whose scales are
not counted."""

KERNELS = {"eager": ENTRIES["eager"].defaults.composed, "fused": ()}
"""Kinds of operators that are composed of torch's operators, by words for kernels."""
LOSSES = {"sharded": False, "gathered": True}
"""Whether every tensor rank gathers the logits, by words for the loss."""


@dataclass(frozen=True, slots=True)
class Training:
    """One optimizer step.

    Parameters
    ----------
    global_batch
        Sequences per step.
    sequence
        Tokens per sequence.
    precision
        One of `PRECISIONS`. ``fp8`` is bf16 training whose layers multiply in fp8.
    optimizer
        One of `OPTIMIZERS`.
    gradient_precision
        One of `GRADIENT_PRECISIONS`; ``None`` means fp32 for bf16 and fp8 training with fp32 main weights, and ``same``
        for all others (Megatron-LM, ``--accumulate-allreduce-grads-in-fp32``, which ``--bf16`` implies).
    state_precision
        One of `STATE_PRECISIONS`, of the moments of the optimizer.
    gradient_clipping
        Whether gradients are scaled down to a largest norm before the optimizer steps (Pascanu et al. 2013).
    framework
        The framework that runs the step, one of `FRAMEWORKS`, with its conventions for memory and time.
    fp8_scaling
        How casts to fp8 find their scales, one of `meshwise.simulator.machine.casts.SCALINGS`; ``None`` is as the
        framework does it.
    frozen
        Whether weights are frozen and only low-rank adapters beside products are trained. Adapters are so small that
        they count for nothing: backward makes no weight gradients, and there are no optimizer states (Hu et al. 2022,
        "LoRA: low-rank adaptation of large language models", section 4.2).
    composed
        Kinds of operators that eager code composes of several kernels where other software runs one, of
        `meshwise.simulator.machine.composition.COMPOSITIONS`. A composed RMS norm keeps its input in fp32 and the
        scaled input beside it.
    gathers_logits
        Whether each tensor rank gathers the logits and computes the whole loss
        (`meshwise.strategies.plan.parallelism`).
    expandable_segments
        Whether torch's allocator grows segments and returns their pages, so that it reserves next to nothing beside
        tensors (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``; c10/cuda/CUDACachingAllocator.cpp).
    """

    global_batch: int
    sequence: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    gradient_precision: str | None = None
    state_precision: str = "fp32"
    gradient_clipping: bool = False
    framework: str = "megatron"
    fp8_scaling: str | None = None
    frozen: bool = False
    composed: tuple[str, ...] = ()
    gathers_logits: bool = False
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.sequence < 1:
            raise ValueError(f"global_batch and sequence are at least 1, met {self.global_batch}, {self.sequence}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, met {self.precision}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, met {self.optimizer}")
        if self.gradient_precision not in (None, *GRADIENT_PRECISIONS):
            known_names = ", ".join(GRADIENT_PRECISIONS)
            raise ValueError(f"gradient_precision is one of {known_names}, met {self.gradient_precision}")
        if self.state_precision not in STATE_PRECISIONS:
            raise ValueError(f"state_precision is one of {', '.join(STATE_PRECISIONS)}, met {self.state_precision}")
        if self.fp8_scaling not in (None, *SCALINGS):
            raise ValueError(f"fp8_scaling is one of {', '.join(SCALINGS)}, met {self.fp8_scaling}")
        if not set(self.composed) <= set(COMPOSITIONS):
            raise ValueError(f"composed names kinds of {', '.join(COMPOSITIONS)}, met {', '.join(self.composed)}")
        if self.framework not in FRAMEWORKS:
            raise ValueError(f"framework is one of {', '.join(FRAMEWORKS)}, met {self.framework}")

    @property
    def unit(self) -> str:
        """What throughput counts: tokens, or samples where a sample is not a sequence of them."""
        return "samples" if self.sequence == 1 else "tokens"

    def run_by(self, framework: str, kernels: str | None = None, loss: str | None = None) -> "Training":
        """Return the step as a framework of the table runs it, with its own kernels and loss where none are named.

        Parameters
        ----------
        kernels
            One of `KERNELS`.
        loss
            One of `LOSSES`.
        """
        defaults = ENTRIES[framework].defaults
        composed = defaults.composed if kernels is None else KERNELS[kernels]
        gathers_logits = defaults.gathers_logits if loss is None else LOSSES[loss]
        return replace(self, framework=framework, composed=composed, gathers_logits=gathers_logits)

    @property
    def conventions(self) -> Framework:
        """The framework's conventions for memory and time."""
        return _build_conventions(self.framework, self.composed)

    @property
    def scaling(self) -> str:
        """How casts to fp8 find their scales, one of `meshwise.simulator.machine.casts.SCALINGS`."""
        return self.fp8_scaling or (TENSOR_SCALING if self.conventions.scales_apart else DELAYED_SCALING)

    @property
    def dtype(self) -> str:
        """The dtype of parameters and activations, in which the model's graph is built."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter in the forward pass."""
        return ITEMSIZE[self.dtype]

    @property
    def quantised_bytes(self) -> int:
        """Bytes of the fp8 copies of one weight, beside the parameter itself; 0 where none is kept.

        Transformer Engine keeps the bf16 weight, an fp8 copy and the copy's transpose, because
        Hopper multiplies fp8 in one layout alone; both copies are made once a step (its user guide,
        "FP8 weight caching"; NVIDIA/TransformerEngine issues 1261 and 257).
        """
        return 2 * ITEMSIZE["fp8"] if self.precision == "fp8" and self.conventions.keeps_quantised else 0

    @property
    def more_bytes(self) -> int:
        """Bytes that one weight of fp8 products needs beyond those of any parameter; negative without its bf16 copy."""
        keeps_fp8_alone = self.precision == "fp8" and self.conventions.quantised_parameters
        return self.quantised_bytes - keeps_fp8_alone * self.parameter_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient as it is accumulated and reduced.

        Megatron-LM accumulates bf16 gradients in fp32 and keeps fp16 ones in fp16.
        """
        if self.frozen:
            return 0
        default_in_fp32 = self.dtype == "bf16" and self._has_main_weights
        in_fp32 = self.gradient_precision == "fp32" if self.gradient_precision else default_in_fp32
        return 4 if in_fp32 else ITEMSIZE[self.dtype]

    @property
    def updated_bytes(self) -> int:
        """Bytes of one parameter that the optimizer writes, and that ranks with shared states gather."""
        if self.frozen:
            return 0
        is_quantised = self.precision == "fp8" and self.conventions.quantised_parameters
        return ITEMSIZE["fp8"] if is_quantised else self.parameter_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for one parameter: moments, and a main copy of 16-bit parameters.

        Rajbhandari et al. 2020, "ZeRO", section 3.1: K = 12 for mixed-precision Adam.
        """
        return self.moment_bytes + self.main_bytes

    @property
    def moment_bytes(self) -> int:
        """Bytes of all moments of one parameter."""
        return 0 if self.frozen else OPTIMIZERS[self.optimizer] * self.state_bytes

    @property
    def main_bytes(self) -> int:
        """Bytes of the main copy of one parameter, beyond those of the parameter that it may share; 0 without one."""
        if self.frozen or not self._has_main_weights:
            return 0
        has_remainders = self.dtype == "bf16" and self.conventions.keeps_remainders
        return ITEMSIZE["fp32"] - has_remainders * self.parameter_bytes

    @property
    def mains_as_shards(self) -> bool:
        """Whether the parameter shards of fully sharded ranks are the main weights among the optimizer states."""
        return self._has_main_weights and self.conventions.keeps_shards and not self.frozen

    @property
    def shard_bytes(self) -> int:
        """Bytes of one parameter in the shard from which a fully sharded rank gathers, and which its host may keep."""
        return ITEMSIZE["fp32"] if self.mains_as_shards else self.parameter_bytes

    @property
    def factored_bytes(self) -> int:
        """Bytes of factored optimizer state for one row or column of a matrix, and for one element of a vector.

        Adafactor keeps a second moment for each row and each column, in fp32 4 (m + n) bytes for an [m, n] matrix, and
        no first moment (Shazeer and Stern 2018, algorithm 4).
        """
        return self.state_bytes if self.optimizer == "adafactor" and not self.frozen else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of a moment: as precise as stated, else fp32 at least."""
        stated_bytes = {"same": ITEMSIZE[self.dtype], "bf16": 2, "int8": 1}
        return stated_bytes.get(self.state_precision, max(ITEMSIZE[self.dtype], 4))

    @property
    def _has_main_weights(self) -> bool:
        """Whether 16-bit parameters have a copy in fp32."""
        return ITEMSIZE[self.dtype] == 2 and self.state_precision != "same"


@lru_cache(maxsize=64)
def _build_conventions(framework: str, composed: tuple[str, ...]) -> Framework:
    return replace(FRAMEWORKS[framework], composed=composed)


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem of a search: a network, a machine and a training step.

    Parameters
    ----------
    memory_margin
        Bytes of device memory needed for every predicted byte of tensors: 1 where predictions are trusted and the
        allocator reserves nothing beside tensors.
    """

    graph: OperatorGraph
    cluster: Cluster
    training: Training
    memory_margin: float = 1.0

    def usable_memory(self, device: Accelerator) -> float:
        """Return the largest predicted peak, in bytes, that fits in a device with the margin.

        The bytes that the framework takes before the first tensor are exact and have no margin.

        >>> from meshwise.simulator.machine.accelerator import Accelerator
        >>> device = Accelerator("any", (("bf16", 1e12),), memory=80.0, memory_bandwidth=1.0, reserved=2.0)
        >>> Problem(None, None, None, memory_margin=1.2).usable_memory(device)
        67.0
        """
        return device.reserved + (device.memory - device.reserved) / self.memory_margin

    def needed_memory(self, device: Accelerator, peak: float) -> float:
        """Return the least device memory, in bytes, in which a predicted peak fits: the inverse of `usable_memory`.

        >>> from meshwise.simulator.machine.accelerator import Accelerator
        >>> device = Accelerator("any", (("bf16", 1e12),), memory=80.0, memory_bandwidth=1.0, reserved=2.0)
        >>> Problem(None, None, None, memory_margin=1.2).needed_memory(device, 67.0)
        80.0
        """
        return device.reserved + (peak - device.reserved) * self.memory_margin

    __repr__ = brief_repr()


def count_node_ranks(problem: Problem, ranks: int) -> int:
    """Return the ranks of a node where all nodes are alike and ``ranks`` are on all of their devices; 0 elsewhere."""
    cluster = problem.cluster
    is_even = len(cluster.nodes) == 1 and not cluster.tenants and ranks == cluster.num_devices
    return cluster.first_node.devices if is_even else 0
