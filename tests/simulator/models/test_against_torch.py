"""Families against plain torch modules written here: parameters, FLOP, and what autograd keeps."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from meshwise.simulator.models.attention import LatentAttention  # noqa: E402
from meshwise.simulator.models.dlrm import Dlrm  # noqa: E402
from meshwise.simulator.models.encoders import T5, Bert  # noqa: E402
from meshwise.simulator.models.experts import Experts  # noqa: E402
from meshwise.simulator.models.model import Model, build  # noqa: E402
from meshwise.simulator.models.presets import MODELS  # noqa: E402
from meshwise.simulator.models.transformer import Transformer  # noqa: E402
from meshwise.simulator.models.unet import UNet  # noqa: E402
from meshwise.simulator.models.vision import ResNet  # noqa: E402
from meshwise.simulator.operator_graph import OperatorGraph  # noqa: E402


def count(*modules: Any) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def graph_of(spec: Model, sequence: int = 16, precision: str = "fp32") -> OperatorGraph:
    return build(spec, sequence, precision)


class Bottleneck(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        self.reduce, self.norm_1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm_2, self.norm_3 = nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)
        self.expand, self.relu = nn.Conv2d(width, 4 * width, 1, bias=False), nn.ReLU(inplace=True)
        shortcut = (nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.shortcut = nn.Sequential(*shortcut) if project else nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.relu(self.norm_1(self.reduce(x)))
        y = self.norm_3(self.expand(self.relu(self.norm_2(self.middle(y)))))
        y += self.shortcut(x)
        return self.relu(y)


def resnet(spec: ResNet) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, spec.stem, 7, 2, 3, bias=False), nn.BatchNorm2d(spec.stem)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = spec.stem
    for stage, depth in enumerate(spec.depths):
        for index in range(depth):
            width, first = spec.stem * 2**stage, index == 0
            layers.append(Bottleneck(channels, width, 2 if first and stage else 1, first))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, spec.classes))


def test_resnet_50_has_the_parameters_and_flop_of_torch() -> None:
    spec = MODELS["resnet-50"]
    assert isinstance(spec, ResNet)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = resnet(spec)
        network(torch.empty(1, 3, 224, 224))
    graph = graph_of(spec)
    assert graph.num_parameters == count(network)
    assert graph.flops == counter.get_total_flops()


def test_resnet_keeps_what_autograd_keeps() -> None:
    spec = ResNet((2, 1), stem=16, image=64, classes=10)
    network, batch = resnet(spec), 2
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = network(torch.randn(batch, 3, spec.image, spec.image))
        nn.functional.cross_entropy(logits, torch.zeros(batch, dtype=torch.int64))
    blocks = graph_of(spec).blocks
    names = [(block, {name for operator in block.operators for name in operator.saved}) for block in blocks]
    told = sum(block.repeat * sum(block.tensor[name].nbytes for name in saved) for block, saved in names)
    # batch norm keeps mean and deviation of every channel besides: below 1 %
    assert sum(kept.values()) == pytest.approx(batch * told, rel=0.01)


def test_a_layer_of_bert_is_torchs_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", norm_first=False, device="meta")
    assert graph_of(Bert(3, 64, 4, 256, 100)).blocks[1].num_parameters == count(layer)


def test_a_layer_of_mixtral_is_attention_router_and_experts() -> None:
    spec = Transformer(
        2, 64, 8, 2, 96, 100, ffn_kind="swiglu", positions="rotary", tied_embeddings=False, experts=Experts(4, 2, 96)
    )
    with torch.device("meta"):
        attention = [nn.Linear(64, width, bias=False) for width in (64, 16, 16, 64)]
        router, norms = nn.Linear(64, 4, bias=False), [nn.RMSNorm(64) for _ in range(2)]
        experts = [nn.Linear(*sizes, bias=False) for _ in range(4) for sizes in ((64, 96), (64, 96), (96, 64))]
        ends = [nn.Embedding(100, 64), nn.RMSNorm(64), nn.Linear(64, 100, bias=False)]
    assert graph_of(spec).num_parameters == 2 * count(*attention, router, *norms, *experts) + count(*ends)


def test_a_layer_of_deepseek_is_latent_attention_with_routed_and_shared_experts() -> None:
    heads, rank, q_rank, nope, rope, value = 4, 24, 40, 16, 8, 12
    latent = LatentAttention(rank, nope, rope, value, q_rank)
    experts = Experts(8, 2, 16, shared=2, dense_layers=1)
    spec = Transformer(
        3, 64, heads, heads, 128, 100, ffn_kind="swiglu", positions="rotary", experts=experts, latent=latent
    )
    with torch.device("meta"):
        attention = [
            nn.Linear(64, q_rank, bias=False),
            nn.RMSNorm(q_rank),
            nn.Linear(q_rank, heads * (nope + rope), bias=False),
            nn.Linear(64, rank + rope, bias=False),
            nn.RMSNorm(rank),
            nn.Linear(rank, heads * (nope + value), bias=False),
            nn.Linear(heads * value, 64, bias=False),
            nn.RMSNorm(64),
            nn.RMSNorm(64),
        ]
        dense = [nn.Linear(64, 3 * 128, bias=False)]
        mixed = [nn.Linear(64, 8, bias=False), *(nn.Linear(64, 3 * 16, bias=False) for _ in range(8 + 2))]
    dense_layer, layer = graph_of(spec).blocks[1:3]
    assert dense_layer.num_parameters == count(*attention, *dense)
    assert layer.num_parameters == count(*attention, *mixed)


def test_t5_is_two_stacks_with_one_embedding() -> None:
    spec = T5(2, 32, 4, 16, 64, 100, decoder_layers=3)
    with torch.device("meta"):
        attention = [nn.Linear(32, 64, bias=False) for _ in range(4)]
        norm, ffn = nn.RMSNorm(32), [nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)]
        once = [nn.Embedding(100, 32), nn.Embedding(32, 4), nn.Embedding(32, 4), nn.RMSNorm(32), nn.RMSNorm(32)]
    encoder = count(*attention, *ffn) + 2 * count(norm)
    decoder = 2 * count(*attention) + count(*ffn) + 3 * count(norm)
    assert graph_of(spec).num_parameters == 2 * encoder + 3 * decoder + count(*once)


def test_dlrm_multiplies_as_torch_does() -> None:
    spec = Dlrm(
        (50, 7), (3, 1), embedding=16, dense=5, bottom=(32, 16), top=(24, 1), interaction="cross", crosses=2, rank=8
    )
    bottom = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    bags = [nn.EmbeddingBag(50, 16, mode="sum"), nn.EmbeddingBag(7, 16, mode="sum")]
    crosses = [(nn.Linear(48, 8, bias=False), nn.Linear(8, 48)) for _ in range(2)]
    top = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))
    with FlopCounterMode(display=False) as counter:
        looked_up = [bags[0](torch.tensor([[0, 1, 2]])), bags[1](torch.tensor([[3]]))]
        first = x = torch.cat([bottom(torch.ones(1, 5)), *looked_up], dim=1)
        for down, up in crosses:
            x = x + first * up(down(x))
        top(x)
    graph = graph_of(spec)
    assert graph.num_parameters == count(bottom, *bags, *(layer for pair in crosses for layer in pair), top)
    assert graph.flops == counter.get_total_flops()


def test_a_residual_block_of_the_unet_is_two_convolutions_with_the_time_between() -> None:
    spec = UNet(widths=(32, 64), attends=(False, True), depth=1, heads=4, image=8, text=5, text_width=48)
    with torch.device("meta"):
        residual = [
            nn.GroupNorm(8, 32),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.Linear(128, 64),
            nn.GroupNorm(8, 64),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.Conv2d(32, 64, 1),
        ]
        attention = [
            nn.GroupNorm(8, 64),
            nn.Conv2d(64, 64, 1),
            *(nn.LayerNorm(64) for _ in range(3)),
            *(nn.Linear(64, 64, bias=False) for _ in range(3)),
            nn.Linear(64, 64),
            nn.Linear(64, 64, bias=False),
            *(nn.Linear(48, 64, bias=False) for _ in range(2)),
            nn.Linear(64, 64),
            nn.Linear(64, 2 * 256),
            nn.Linear(256, 64),
            nn.Conv2d(64, 64, 1),
        ]
    block = next(block for block in graph_of(spec).blocks if block.name == "down_2_1")
    assert block.num_parameters == count(*residual, *attention)
