import pytest

from meshwise.scenarios.intervals import Category, find_category
from meshwise.scenarios.published.machine import build_machine, nic_rate, pcie_generation
from meshwise.scenarios.published.row import Row
from meshwise.simulator.machine.topology import Switch

GB = 1e9


@pytest.mark.parametrize(
    ("accelerator", "memory", "a_node", "devices", "preset", "nodes", "used"),
    [
        ("A100 SXM", 80, 8, 64, "dgx-a100-80gb", 8, 8),
        ("NVIDIA A100-SXM4-40GB", None, 8, 8, "dgx-a100-40gb", 1, 8),
        ("H100 SXM", 80, 8, 4, "dgx-h100", 1, 4),
        ("H100 SXM", 80, 8, 12, "dgx-h100", 2, 6),  # the most of a node that divides 12
        ("H200", 141, None, 16, "dgx-h200", 2, 8),
        ("GB200 (per GPU)", 186, 4, 256, "gb200-nvl72", 4, 64),
        ("GB300 NVL72", 288, 4, 72, "gb300-nvl72", 1, 72),
        ("V100 SXM2", 16, 8, 8, "dgx-1-v100-16gb", 1, 8),
        ("V100", 32, 16, 16, "dgx-2-v100-32gb", 1, 16),
        ("AMD Instinct MI300X", 192, 8, 8, "mi300x-8", 1, 8),
        ("Ascend 910B (Atlas 900/800T A2)", None, 8, 16, "atlas-800t-a2", 2, 8),
        ("TPU v5e", 16, None, 256, "tpu-v5e", 32, 8),
    ],
)
def test_machines(
    accelerator: str, memory: int | None, a_node: int | None, devices: int, preset: str, nodes: int, used: int
) -> None:
    row = Row({"accelerator": accelerator, "accel_mem_gb": memory, "devices_per_node": a_node})
    found = build_machine(row, devices)
    assert (found.name, found.num_nodes, found.first_node.devices) == (preset, nodes, used)


@pytest.mark.parametrize(
    ("accelerator", "clock"),
    [
        ("H100 SXM 80GB 350W", 0.5 ** (1 / 3)),  # half of 700 W: a clock of 0.79
        ("A100 SXM 80GB, 300 W", 0.75 ** (1 / 3)),
        ("H100 SXM 80GB 700W", 1.0),
        ("H100 SXM 80GB 1500W", 1.0),  # no limit
        ("H100 PCIe 350W", 756 / 989),  # its data sheet's own rate and limit
    ],
)
def test_a_power_limit_lowers_the_clock_by_its_cube_root(accelerator: str, clock: float) -> None:
    row = Row({"accelerator": accelerator})
    device, whole = (build_machine(each, 8).accelerator for each in (row, Row({"accelerator": accelerator[:8]})))
    assert device.peak("bf16") == pytest.approx(clock * whole.peak("bf16"))
    assert not any("not used" in line for line in row.assumed)
    if " PCIe" not in accelerator:
        assert device.memory_bandwidth == whole.memory_bandwidth


def test_a_relative_is_scaled_to_its_data_sheet_and_says_so() -> None:
    row = Row({"accelerator": "NVIDIA L40S", "accel_mem_gb": 48, "intra_node_link": "PCIe Gen4"})
    device = build_machine(row, 8).accelerator
    assert device.peak("bf16") == pytest.approx(362e12)
    assert device.peak("fp8") == pytest.approx(1979e12 * 362 / 989)  # in proportion to the H100
    assert (device.memory, device.memory_bandwidth) == (48 * GB, 0.864e12)
    assert row.assumed[0].startswith("L40S: as the accelerator of dgx-h100 with 362 TFLOP/s")


def test_a_kind_of_memory_has_its_bandwidth() -> None:
    device = build_machine(Row({"accelerator": "H100 SXM 96GB HBM2e"}), 8).accelerator
    assert (device.peak("bf16"), device.memory, device.memory_bandwidth) == (989e12, 96 * GB, 2.4e12)


def test_a_link_of_an_export_variant_is_narrower() -> None:
    link = build_machine(Row({"accelerator": "A800 80GB"}), 8).first_node.network
    assert isinstance(link, Switch) and link.link.bandwidth == 160 * GB


def test_an_unknown_accelerator_has_the_figures_that_a_row_states() -> None:
    row = Row({"accelerator": "XPU 9", "peak_tflops_used": 494.5, "accel_mem_gb": 64})
    device = build_machine(row, 8).accelerator
    assert device.peak("bf16") == pytest.approx(494.5e12)
    assert device.memory == 64 * GB


@pytest.mark.parametrize(
    ("fields", "preset"),
    [
        ({"accelerator": "H101"}, "dgx-h100"),  # by name
        ({"accelerator": "XPU 9", "accel_mem_gb": 141}, "dgx-h200"),  # by memory
        ({"accelerator": "XPU 9"}, "dgx-a100-80gb"),  # the commonest
        ({}, "dgx-a100-80gb"),
    ],
)
def test_an_unknown_accelerator_is_the_nearest_with_the_widest_interval(fields: dict[str, object], preset: str) -> None:
    row = Row(fields)
    found = build_machine(row, 8)
    assert found.name == preset
    assert find_category(found, row.assumed) is Category.UNREAD


@pytest.mark.parametrize(
    ("accelerator", "terabytes"),
    [("H100 80GB HBM3", 3.35), ("H100 SXM 96GB HBM2e", 2.4), ("H100 2.4 TB/s", 2.4), ("H100 PCIe HBM2e", 2.0)],
)
def test_words_for_memory_are_used(accelerator: str, terabytes: float) -> None:
    row = Row({"accelerator": accelerator})
    assert build_machine(row, 8).accelerator.memory_bandwidth == pytest.approx(terabytes * 1e12)
    assert not any("not used" in line for line in row.assumed)


@pytest.mark.parametrize(
    ("field", "words", "line"),
    [
        ("accelerator", "H100 SXM 80GB watercooled", "accelerator words not used: 'watercooled'"),
        ("accelerator", "A100 HBM3", "accelerator words not used: 'hbm3', which a100 has not by its data sheet"),
        ("inter_node_link", "8 x 400 Gb/s NDR on a fat tree", "inter_node_link words not used: 'fat tree'"),
        ("intra_node_link", "NVLink4 at half width", "intra_node_link words not used: 'half width'"),
    ],
)
def test_words_of_a_machine_that_are_not_used_are_told(field: str, words: str, line: str) -> None:
    row = Row({"accelerator": "H100 SXM", field: words})
    build_machine(row, 16)
    assert line in row.assumed


def test_slices_of_a_torus_are_joined_by_hosts() -> None:
    fields = {"accelerator": "TPU v5p", "plan_note": "4 slice(s) of 64 chips; FSDP inside a slice"}
    found = build_machine(Row(fields), 256)
    assert (found.name, found.num_nodes, found.first_node.devices) == ("tpu-v5p-slices", 4, 64)


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"nic_gbps_per_device": 200}, 1600),
        ({"inter_node_link": "RoCE, 1600 Gbps node-node"}, 1600),
        ({"inter_node_link": "4x100 Gbps EFA"}, 400),
        ({"inter_node_link": "8 NICs x 400 Gb/s"}, 3200),
        ({"inter_node_link": "CX-7 400Gb/s x 8"}, 3200),
        ({"inter_node_link": "Spectrum-X 400G"}, 3200),  # one a device
        ({"nic_gbps_per_device": "8x50", "inter_node_link": "100GbE"}, 100),
        ({"inter_node_link": "8 x 400Gb/s NDR InfiniBand"}, 3200),
        ({"inter_node_link": "InfiniBand HDR (Selene)"}, 1600),  # one a device
        ({"inter_node_link": "InfiniBand EDR"}, 100),  # one a node
        ({"inter_node_link": "100GbE"}, 100),
        ({"inter_node_link": "25 Gb/s Ethernet"}, 25),
        ({"inter_node_link": "400 Gbps per GPU"}, 3200),
        ({"inter_node_link": "EFA 3.2 Tbps"}, 3200),
        ({"inter_node_link": "12.5 GB/s RoCE"}, 100),  # bytes
        ({"inter_node_link": "DCN between slices"}, None),
        ({}, None),
    ],
)
def test_what_the_nics_of_8_devices_send(fields: dict[str, object], bits: float | None) -> None:
    rate = nic_rate(Row(fields), 8)
    assert rate is None if bits is None else rate == pytest.approx(bits / 8 * GB)


def test_a_stated_nic_replaces_the_machines_own() -> None:
    row = Row({"accelerator": "H100 SXM", "nic_gbps_per_device": 100})
    node = build_machine(row, 16).first_node
    assert node.nics * node.nic.bandwidth == pytest.approx(0.84 * 8 * 100 / 8 * GB)
    assert any("NICs of 800 Gb/s a node in all, as the row states" in line for line in row.assumed)


@pytest.mark.parametrize(
    ("words", "generation"),
    [
        ("PCIe 3.0 x16", 3),
        ("PCIe Gen5", 5),
        ("PCIe", 4),
        ("NVLink bridge + PCIe", None),
        ("NVSwitch", None),
        ("", None),
    ],
)
def test_pcie_inside_a_node(words: str, generation: int | None) -> None:
    assert pcie_generation(Row({"intra_node_link": words})) == generation
