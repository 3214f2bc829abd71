"""The machine whose devices are measured, as rows name it."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from meshwise.executor.calibration.device_machine import describe_machine, look_up_name  # noqa: E402
from meshwise.simulator.calibration.kernel_rows import DEVICES  # noqa: E402


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM"),
        ("NVIDIA GB200", "GB200 SXM"),
        ("NVIDIA B200", "B200 SXM"),
        ("NVIDIA GH200 480GB", "GH200 SXM 96GB"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2"),
    ],
)
def test_drivers_names_are_names_of_rows(driver: str, name: str) -> None:
    assert look_up_name(driver)[0] == name
    assert name in DEVICES
    assert look_up_name("Some GPU") == ("Some GPU", "PCIe")


def test_a_gpus_machine_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=15e10))
    found = describe_machine("cuda")
    assert (found.accelerator, found.num_devices, found.memory, found.link) == ("H200 SXM", 8, 15e10, "PCIe")
    assert found.fields()["source_id"] == f"meshwise_h200_sxm_{found.date}"
