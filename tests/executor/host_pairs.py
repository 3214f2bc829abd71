"""Two hosts with a wire between them: network namespaces of this machine, and a torchrun in each."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TWO_HOSTS = Path(__file__).parent / "launch" / "two_hosts.sh"
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--pid", "--mount-proc", "--kill-child", "bash"]


def run_two_hosts(*arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of a run on hosts ``a`` and ``b``; without arguments the hosts are only set up."""
    environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"} | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
    }
    command = [*NAMESPACES, str(TWO_HOSTS), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def require_namespaces() -> None:
    """Skip the test where this machine has no network namespaces for its user."""
    if problem := _find_problem():
        pytest.skip(f"needs network namespaces: {problem}")


@cache
def _find_problem() -> str:
    tools = [tool for tool in ("unshare", "nsenter", "ip", "torchrun") if shutil.which(tool) is None]
    if tools == ["torchrun"] and Path(sys.executable).with_name("torchrun").exists():
        tools = []
    if tools:
        return ", ".join(tools)
    result = run_two_hosts()
    return (result.stderr.strip() or "no reason told") if result.returncode else ""
