"""A language model of Hugging Face from its ``config.json``, with random weights; nothing is downloaded.

``HF_CONFIG=config.json meshwise capture scenarios/operators/hugging_face.py:model --out graph.json``; ``BATCH`` and
``SEQUENCE`` are the samples and their tokens. It needs ``pip install 'meshwise[exec,hf]'``.
"""

import os

import torch
from torch import Tensor, nn


class WithLoss(nn.Module):
    """A model whose forward returns the cross-entropy of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Return the mean over all tokens; each has its target."""
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model that the file in ``HF_CONFIG`` describes, and random tokens with their targets."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(os.environ["HF_CONFIG"])
    config.use_cache = False
    masked = any(name.endswith("ForMaskedLM") for name in config.architectures or ())
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    shape = int(os.environ.get("BATCH", "2")), int(os.environ.get("SEQUENCE", "128"))
    inputs = torch.randint(config.vocab_size, shape), torch.randint(config.vocab_size, shape)
    return WithLoss(kind.from_config(config)), inputs
