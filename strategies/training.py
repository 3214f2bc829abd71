"""What is trained and how: batch, precision and optimizer, and the bytes they keep."""

from dataclasses import dataclass

from simulator.operator_graph import ITEMSIZE

PRECISIONS = ("fp64", "fp32", "fp16", "bf16")
OPTIMIZERS = {"adamw": 2, "sgd": 1}
"""State tensors of the size of a parameter: AdamW keeps two moments, SGD one momentum."""


@dataclass(frozen=True, slots=True)
class Training:
    """One optimizer step.

    Parameters
    ----------
    global_batch
        Sequences a step.
    sequence
        Tokens a sequence.
    """

    global_batch: int
    sequence: int
    precision: str = "bf16"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.sequence < 1:
            raise ValueError(f"global_batch and sequence are at least 1, met {self.global_batch}, {self.sequence}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, met {self.precision}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, met {self.optimizer}")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter as the forward pass reads it."""
        return ITEMSIZE[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient as it is accumulated and reduced.

        Megatron-LM accumulates bf16 gradients in fp32 and keeps fp16 ones in fp16.
        """
        return 4 if self.precision == "bf16" else ITEMSIZE[self.precision]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for one parameter: moments, and a main copy for 16-bit ones.

        Rajbhandari et al. 2020, "ZeRO", section 3.1: K = 12 for mixed-precision Adam.
        """
        half = self.precision in ("fp16", "bf16")
        state = 4 if half else ITEMSIZE[self.precision]
        return state * (OPTIMIZERS[self.optimizer] + half)
