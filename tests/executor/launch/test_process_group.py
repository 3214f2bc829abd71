"""Joining a process group: over the interface that reaches the master, in a folder that all hosts share."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from meshwise.executor.launch.process_group import find_address, find_interface, find_loopback
from tests.host_processes import is_loopback

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
