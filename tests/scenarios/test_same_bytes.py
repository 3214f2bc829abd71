"""The same scenario gives the same bytes, whatever the hash seed."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["machines/llama2-13b-32-a100-straggler", "machines/gpt-70b-16-v100-offload"])
def test_a_simulation_is_the_same_under_five_hash_seeds(name: str) -> None:
    found = set()
    for seed in range(5):
        command = [sys.executable, "-m", "scenarios", "simulate", name, "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        result = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        del result["wall_time"]
        found.add(json.dumps(result))
    assert len(found) == 1
