"""The problems that searches are compared on: every kind of network, 8 to 1,024 devices, roomy and tight."""

from dataclasses import dataclass, replace

from scenarios.loader import load
from simulator import catalog
from simulator.models.model import build
from simulator.models.presets import MODELS
from strategies.problem import Problem
from strategies.search import Space
from strategies.search.space import CORE, WIDE
from strategies.training import Training


@dataclass(frozen=True, slots=True)
class Case:
    """A problem by name: a scenario of the library, or presets and sizes.

    Parameters
    ----------
    kind
        What is particular about it.
    library
        The scenario; where it is named, the fields after it are its own, but for ``batch`` where that is given.
    batch
        Sequences of a step.
    wide
        Whether the space has all that a layout can be, not only its core.
    """

    name: str
    kind: str
    library: str = ""
    model: str = ""
    cluster: str = ""
    nodes: int = 1
    batch: int = 0
    sequence: int = 2048
    precision: str = "bf16"
    wide: bool = False

    @property
    def space(self) -> Space:
        """What is chosen from."""
        return WIDE if self.wide else CORE

    def problem(self) -> Problem:
        """Return what is to be laid out."""
        if self.library:
            stated = load(self.library).problem
            batch = self.batch or stated.training.global_batch
            return replace(stated, training=replace(stated.training, global_batch=batch))
        training = Training(self.batch, self.sequence, self.precision)
        graph = build(MODELS[self.model], self.sequence, training.dtype)
        return Problem(graph, catalog.cluster(self.cluster, self.nodes), training)


A100, H100, V100, B200 = "dgx-a100-80gb", "dgx-h100", "dgx-1-v100-32gb", "dgx-b200"
CASES = (
    Case("GPT-3 1.3B, 8 A100", "dense", "", "gpt3-1.3b", A100, 1, 32),
    Case("Llama 3 8B, 8 H100", "dense", "llama3-8b-8-h100", batch=32),
    Case("GPT-3 6.7B, 16 A100", "dense", "", "gpt3-6.7b", A100, 2, 32),
    Case("GPT-3 13B, 32 A100", "dense", "", "gpt3-13b", A100, 4, 32),
    Case("Llama 3 70B, 64 H100", "dense", "llama3-70b-64-h100"),
    Case("Llama 2 70B, 128 H100", "dense", "", "llama2-70b", H100, 16, 128, 4096),
    Case("GPT-3 175B, 256 H100", "dense", "", "gpt3-175b", H100, 32, 64),
    Case("GPT-3 175B, 1,024 A100", "dense", "gpt3-175b-1024-a100", batch=128),
    Case("Megatron 530B, 512 B200", "dense", "", "megatron-530b", B200, 64, 64),
    Case("DeepSeek-V2-Lite, 16 H100", "experts", "deepseek-v2-lite-16-h100", batch=32),
    Case("Mixtral 8x7B, 64 H100", "experts", "mixtral-8x7b-64-h100", batch=64),
    Case("Qwen3 30B-A3B, 32 H100", "experts", "qwen3-30b-a3b-32-h100", batch=32),
    Case("Mixtral 8x22B, 128 H100", "experts", "mixtral-8x22b-128-h100"),
    Case("BERT-large, 8 A100", "encoder", "bert-large-8-a100", batch=64),
    Case("T5-11B, 16 A100", "encoder and decoder", "t5-11b-16-a100", batch=32),
    Case("ViT-H/14, 8 A100", "vision", "vit-h-14-8-a100", batch=64),
    Case("ResNet-50, 8 A100", "vision", "resnet-50-8-a100", batch=64),
    Case("Stable Diffusion, 32 A100", "vision", "stable-diffusion-1.5-32-a100", batch=64),
    Case("DLRM DCNv2, 8 B300", "recommender", "dlrm-dcnv2-8-b300"),
    Case("Llama 2 13B, 8 A100", "tight memory", "", "llama2-13b", A100, 1, 32, 4096),
    Case("GPT-3 6.7B, 8 V100", "tight memory", "", "gpt3-6.7b", V100, 1, 32, precision="fp16"),
    Case("Llama 2 70B, 32 A100", "tight memory", "", "llama2-70b", A100, 4, 32, 4096),
    Case("GPT-3 13B, 32 V100", "slow network", "", "gpt3-13b", V100, 4, 32, precision="fp16"),
    Case("Llama 2 7B, 16 A100 at 100 Gb/s", "slow network", "", "llama2-7b", "gcp-a2-highgpu-8g", 2, 32, 4096),
    Case("Llama 2 70B, 16 H100 and 16 A100", "mixed devices", "llama2-70b-16-h100-16-a100"),
    Case("Llama 2 13B, 32 A100", "straggler", "llama2-13b-32-a100-straggler"),
    Case("Llama 2 13B, 64 TPU v4", "torus", "llama2-13b-64-tpu-v4"),
    Case("Llama 3 8B, 16 H100, 64k tokens", "long context", "", "llama3-8b", H100, 2, 16, 65536),
    Case("Llama 3 70B, 128 H100, 32k tokens", "long context", "", "llama3-70b", H100, 16, 32, 32768),
)
"""From small to large within a kind; none takes a search more than seconds to prove."""

WIDE_CASES = tuple(
    replace(case, wide=True)
    for case in CASES
    if case.name in ("GPT-3 1.3B, 8 A100", "Llama 2 13B, 8 A100", "DeepSeek-V2-Lite, 16 H100", "GPT-3 13B, 32 V100")
)
"""With spaces of 70,000 plans and more, which no budget exhausts, small enough to be proven."""
