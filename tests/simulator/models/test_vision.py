"""ResNet against a plain torch module written here: parameters, FLOP, and what autograd keeps."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from meshwise.simulator.models.presets import MODELS  # noqa: E402
from meshwise.simulator.models.vision import ResNet  # noqa: E402

from .graphs import count, graph_of  # noqa: E402


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
