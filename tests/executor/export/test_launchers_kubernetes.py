"""A manifest reads back as what the request says, whatever names hold."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_requests import HOSTILE, request

from meshwise.executor.export.launchers import MAX_LABEL, UnsupportedRequest, to_kubernetes


def _read(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    config, service, job = yaml.safe_load_all(text)
    assert [each["kind"] for each in (config, service, job)] == ["ConfigMap", "Service", "Job"]
    return config, service, job


def _pod(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def _expanded(words: list[str], node: int) -> list[str]:
    """Return a command as Kubernetes hands it over: ``$$`` is a dollar, ``$(NODE_RANK)`` the value of the variable."""
    return [re.sub(r"\$(\$|\(NODE_RANK\))", lambda m: "$" if m[1] == "$" else str(node), word) for word in words]


@pytest.mark.parametrize(("ranks", "processes", "gpus"), [(4, 2, False), (8, 8, True), (6, 1, True)])
def test_numbers(ranks: int, processes: int, gpus: bool) -> None:
    asked = request(ranks, processes, device="cuda" if gpus else "cpu")
    config, service, job = _read(to_kubernetes(asked))
    spec, pod = job["spec"], _pod(job)
    nodes = ranks // processes
    assert (job["apiVersion"], spec["completionMode"], spec["backoffLimit"]) == ("batch/v1", "Indexed", 0)
    assert spec["completions"] == spec["parallelism"] == nodes
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    [container] = pod["containers"]
    words = container["command"][container["command"].index("torchrun") :]
    assert dict(zip(words[1:-3:2], words[2:-3:2], strict=True)) == {
        "--nnodes": str(nodes),
        "--node-rank": "$(NODE_RANK)",
        "--nproc-per-node": str(processes),
        "--master-addr": f"{job['metadata']['name']}-0.{service['metadata']['name']}",
        "--master-port": "29518",
    }
    assert container["resources"]["limits"] == {"cpu": processes} | ({"nvidia.com/gpu": processes} if gpus else {})
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert ("NCCL_DEBUG" in variables) is gpus and variables["OMP_NUM_THREADS"] == "1"
    assert json.loads(config["data"]["job.json"]) == json.loads(asked.job.to_text())
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]} == {"config", "volume"} | ({"shm"} if gpus else set())
    assert pod["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_labels(name: str) -> None:
    parts = _read(to_kubernetes(request(8, 1, name=name)))
    plain = _read(to_kubernetes(request(8, 1, name="x")))
    called = parts[2]["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", called) and len(f"{called}-7") <= MAX_LABEL
    renamed = re.sub(f'"{called}(?=["-])', '"x', json.dumps(parts)).replace(f".{called}", ".x")
    assert json.loads(renamed) == list(plain)


@pytest.mark.parametrize("folder", ["a b", "it's", "$(NODE_RANK)", '"; touch pwned; "', "$HOME", "$$", "/x"])
def test_pod_puts_the_job_into_its_folder_and_runs_torchrun(folder: str, tmp_path: Path) -> None:
    config, _, job = _read(to_kubernetes(request(folder=folder)))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "job.json").write_text(config["data"]["job.json"])
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    [container] = _pod(job)["containers"]
    words = [word.replace("/meshwise/", f"{tmp_path}/") for word in _expanded(container["command"], 1)]
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NODE_RANK": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    run = tmp_path / "volume" / folder.lstrip("/")
    assert done.stdout.splitlines()[2:4] == ["--node-rank", "1"]
    assert done.stdout.splitlines()[-1] == str(run / "job.json")
    assert [path.name for path in run.iterdir()] == ["job.json"]
    assert (run / "job.json").read_text() == config["data"]["job.json"]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, "image: the name of a container image with meshwise and torch, met none"),
        ({"image": "a b"}, "met 'a b'"),
        ({"claim": None}, "claim: the name of a volume claim that all pods can write, met none"),
        ({"claim": "Runs"}, "met 'Runs'"),
        ({"claim": "x" * 254}, "claim: "),
        ({"folder": ""}, "folder: "),
    ],
)
def test_what_it_cannot_say(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedRequest, match=re.escape(words)):
        to_kubernetes(request(**changes))


def test_all_reasons_at_once() -> None:
    with pytest.raises(UnsupportedRequest, match=r"met 3 processes .*image: .*claim: "):
        to_kubernetes(request(4, 3, image=None, claim=None))
