"""Every preset against the counts that its authors published."""

import pytest

from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorGraph, OperatorKind

# elements of the released weights; ResNet and ViT: torchvision's ``num_params``
EXACT = {
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # BertModel has 109,482,240 and 335,141,888; the heads of pre-training add a dense layer h h + h, a norm 2 h,
    # the bias of the vocabulary and two classes 2 h + 2: 624,188 and 1,084,220
    "bert-base": 109_482_240 + 768 * 768 + 768 + 2 * 768 + 30_522 + 2 * 768 + 2,
    "bert-large": 335_141_888 + 1024 * 1024 + 1024 + 2 * 1024 + 30_522 + 2 * 1024 + 2,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "stable-diffusion-1.5": 859_520_964,
}

# torchvision's ``_ops``: multiply-adds in 1e9 at 224 x 224
MULTIPLY_ADDS = {
    "resnet-50": 4.089,
    "resnet-101": 7.801,
    "resnet-152": 11.514,
    "vit-b-16": 17.564,
    "vit-l-16": 61.555,
    "vit-h-14": 167.295,
}

# parameters that one token meets, in 1e9: Jiang et al. 2024, table 1; DeepSeek-AI 2024, "DeepSeek-V2" and
# "DeepSeek-V3", abstracts; Yang et al. 2025, "Qwen3 technical report", section 2
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "deepseek-v2-lite": 2.4,
    "deepseek-v2": 21,
    "deepseek-v3": 37,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
}


def graph_of(name: str, sequence: int = 512) -> OperatorGraph:
    return build(MODELS[name], sequence, "bf16")


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    assert graph_of(name).num_parameters == EXACT[name]


@pytest.mark.parametrize("name", MULTIPLY_ADDS)
def test_multiply_adds_are_those_that_torchvision_states(name: str) -> None:
    assert graph_of(name).flops / 2e9 == pytest.approx(MULTIPLY_ADDS[name], abs=6e-4)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_the_published_number_of_parameters(name: str) -> None:
    # 2 FLOP a token and parameter of a product. Some authors count the embedding, which is looked up, and some do
    # not; 2.5 % is what rounding to two digits may hide
    sequence, spec = 2048, MODELS[name]
    assert isinstance(spec, Transformer)
    products = (OperatorKind.MATMUL, OperatorKind.GROUPED_MATMUL)
    graph = graph_of(name, sequence)
    flops = sum(o.flops * block.repeat for block in graph.blocks for o in block.operators if o.kind in products)
    multiplied = flops / (2 * sequence) / 1e9
    embedding = spec.vocab * spec.hidden / 1e9
    assert multiplied * 0.975 <= ACTIVE[name] <= (multiplied + embedding) * 1.025


def test_the_unet_multiplies_as_often_as_measured() -> None:
    # Kim et al. 2023, "BK-SDM", table 2: 339 G multiply-adds without those inside attention, which are
    # 2 points^2 channels for itself and 2 points * 77 * channels for the text, 5 times on each of three levels, and
    # once in the middle
    graph = graph_of("stable-diffusion-1.5")
    levels = [(64 * 64, 320, 5), (32 * 32, 640, 5), (16 * 16, 1280, 5), (8 * 8, 1280, 1)]
    inside = sum(times * 2 * points * (points + 77) * channels for points, channels, times in levels)
    assert graph.flops / 2 - inside == pytest.approx(339e9, abs=0.5e9)


def test_dlrm_holds_its_tables_and_layers() -> None:
    # 204,184,588 rows of 128; layers 13-512-256-128 and 479-1024-1024-512-256-1, where 479 = 128 + 27 * 26 / 2
    bottom = 14 * 512 + 513 * 256 + 257 * 128
    tail = 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
    assert graph_of("dlrm-criteo").num_parameters == 204_184_588 * 128 + bottom + 480 * 1024 + tail
    # crosses: 27 * 128 = 3456 numbers, three times through rank 512 and back with a bias
    crosses = 3 * (2 * 3456 * 512 + 3456)
    assert graph_of("dlrm-dcnv2").num_parameters == 204_184_588 * 128 + bottom + crosses + 3457 * 1024 + tail


def test_dlrm_multiplies_what_its_layers_do() -> None:
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    tail = 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert graph_of("dlrm-criteo").flops / 2 == bottom + 27 * 27 * 128 + 479 * 1024 + tail
    assert graph_of("dlrm-dcnv2").flops / 2 == bottom + 3 * 2 * 3456 * 512 + 3456 * 1024 + tail
