"""Joining a process group: over the interface that reaches the master, in a folder that all hosts share."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from meshwise.executor.launch.process_group import (  # noqa: E402
    find_address,
    find_interface,
    find_loopback,
    join_process_group,
)
from tests.host_processes import is_loopback  # noqa: E402

ROOT = Path(__file__).parents[3]


def test_folder_that_hosts_do_not_share_is_said() -> None:
    command = [sys.executable, "-m", "meshwise.executor.launch.worker", "/no/job.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "/no is not here; hosts of a run share it" in done.stderr


def test_interface_is_the_one_that_reaches_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_interface("127.0.0.1") == find_interface("localhost") == find_loopback()
    assert is_loopback(find_address("localhost"))
    monkeypatch.setattr("meshwise.executor.launch.process_group.find_address", lambda master: "127.0.1.1")
    with pytest.raises(ValueError, match=r"MASTER_ADDR is an address that all hosts reach, met node0, which is 127\.0"):
        find_interface("node0")


def test_groups_of_gloo_have_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of a group free one string twice: see `meshwise.executor.recording.private_torch`."""
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", distributed_c10d.ProcessGroupGloo)  # restored in the end
    with join_process_group(tmp_path, 10.0):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
        groups = [dist.group.WORLD, dist.new_group([0]), dist.new_subgroups_by_enumeration([[0]])[0], mesh.get_group(1)]
        options = [group._get_backend(torch.device("cpu")).options for group in groups]
        assert [option._threads for option in options] == [1] * len(groups)
        assert options[0]._timeout.total_seconds() == 10.0
        total = torch.ones(())
        dist.all_reduce(total, group=groups[-1])
        assert total == 1
